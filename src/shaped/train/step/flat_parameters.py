"""All parameters of a model as a few long vectors, and Adam on them: one kernel a group, one message to other processes, one file.

Matrices may have a bfloat16 copy beside the float32 ones, which the forward and backward passes use and Adam renews as it goes: no pass
over the weights for casting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shaped.nn.blocks import gains
from shaped.nn.schedules import Shapeable

ALIGNED = 64  # entries: views start at multiples of 256 bytes, as kernels like it
BETAS, EPSILON = (0.9, 0.999), 1e-8

KINDS = ("matrices", "head", "embeddings", "vectors", "gains", "shaping")
IN_HALF = ("matrices", "head")
HEADS = ("head.weight", "classifier.weight")


def kinds(model: nn.Module) -> dict[str, str]:
    """Which kind each parameter is: each has a learning rate of its own."""
    of_gains = {id(gain) for gain in gains(model).values()}
    of_shaping = {id(gain) for module in model.modules() if isinstance(module, Shapeable) for gain in module.parameters(recurse=False)}
    of_tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}

    def kind(name: str, parameter: nn.Parameter) -> str:
        if id(parameter) in of_gains:
            return "shaping" if id(parameter) in of_shaping else "gains"
        if id(parameter) in of_tables:
            return "embeddings"
        if name in HEADS:
            return "head"
        return "matrices" if parameter.ndim >= 2 else "vectors"

    return {name: kind(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}


@dataclass
class Vector:
    """The parameters of one kind: their values, Adam's two moments, and the gradients, each of them one vector."""

    kind: str
    shapes: dict[str, torch.Size]
    values: Tensor
    first: Tensor
    second: Tensor
    gradients: Tensor
    working: Tensor
    """What the passes compute with: the values themselves, or their bfloat16 copy."""

    @classmethod
    def of(cls, kind: str, shapes: dict[str, torch.Size], half: bool, device: torch.device) -> Vector:
        size = sum(_padded(shape.numel()) for shape in shapes.values())
        values, first, second = (torch.zeros(size, device=device) for _ in range(3))
        working = values.to(torch.bfloat16) if half else values
        return cls(kind, shapes, values, first, second, torch.zeros_like(working), working)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        start, views = 0, {}
        for name, shape in self.shapes.items():
            views[name] = vector[start : start + shape.numel()].view(shape)
            start += _padded(shape.numel())
        return views

    def renew(self) -> None:
        if self.working is not self.values:
            self.working.copy_(self.values)


def vectors(model: nn.Module, half: bool, device: torch.device) -> list[Vector]:
    parameters, of = dict(model.named_parameters()), kinds(model)
    grouped = {kind: {name: parameters[name].shape for name in of if of[name] == kind} for kind in KINDS}
    return [Vector.of(kind, shapes, half and kind in IN_HALF, device) for kind, shapes in grouped.items() if shapes]


def adam(
    values: Tensor,
    first: Tensor,
    second: Tensor,
    gradients: Tensor,
    working: Tensor | None,
    factor: Tensor,
    lr: Tensor,
    corrections: Tensor,
    alive: Tensor | None,
) -> None:
    """A step of Adam (Kingma and Ba 2015) in place; nothing changes if `alive` is False.

    `factor` multiplies the gradients (clipping); `corrections` are 1 - beta^t for both moments.
    """
    gradients = gradients.float() * factor
    mean = first + (gradients - first) * (1 - BETAS[0])
    square = second * BETAS[1] + gradients * gradients * (1 - BETAS[1])
    moved = values - lr * (mean / corrections[0]) / ((square / corrections[1]).sqrt() + EPSILON)
    if alive is not None:
        mean, square, moved = torch.where(alive, mean, first), torch.where(alive, square, second), torch.where(alive, moved, values)
    first.copy_(mean)
    second.copy_(square)
    values.copy_(moved)
    if working is not None:
        working.copy_(moved)


Adam = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None], None]


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
