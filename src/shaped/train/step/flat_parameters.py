"""The parameters of a model as a few long vectors: one optimiser kernel a group, one all-reduce a group, one checkpoint file.

Matrices may have a bfloat16 working copy beside the float32 values. The forward and backward passes use the copy, and the optimiser renews
it in the same kernel: casting costs no pass over the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shaped.nn.blocks import gains
from shaped.nn.schedules import Shapeable

ALIGNED = 64  # entries: views start at multiples of 256 bytes, which suits vectorised kernels

KINDS = ("matrices", "head", "embeddings", "vectors", "gains", "shaping")
IN_HALF = ("matrices", "head")
HEADS = ("head.weight", "classifier.weight")


def classify_parameters(model: nn.Module) -> dict[str, str]:
    """The kind of each trained parameter, by name. Each kind has its own learning rate."""
    of_gains = {id(gain) for gain in gains(model).values()}
    of_shaping = {id(gain) for module in model.modules() if isinstance(module, Shapeable) for gain in module.parameters(recurse=False)}
    of_tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}

    def classify(name: str, parameter: nn.Parameter) -> str:
        if id(parameter) in of_gains:
            return "shaping" if id(parameter) in of_shaping else "gains"
        if id(parameter) in of_tables:
            return "embeddings"
        if name in HEADS:
            return "head"
        return "matrices" if parameter.ndim >= 2 else "vectors"

    return {name: classify(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}


@dataclass
class ParameterGroup:
    """The parameters of one kind. Values, optimiser state, gradients and working copy are one vector each."""

    kind: str
    shapes: dict[str, torch.Size]
    values: Tensor
    state: dict[str, Tensor]
    gradients: Tensor
    working: Tensor
    """What the passes compute with: the values themselves, or their bfloat16 copy."""

    @classmethod
    def of(cls, kind: str, shapes: dict[str, torch.Size], half: bool, device: torch.device, state: tuple[str, ...]) -> ParameterGroup:
        size = sum(_pad(shape.numel()) for shape in shapes.values())
        values = torch.zeros(size, device=device)
        working = values.to(torch.bfloat16) if half else values
        return cls(kind, shapes, values, {name: torch.zeros_like(values) for name in state}, torch.zeros_like(working), working)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The parameters' parts of one of the vectors, by name."""
        start, views = 0, {}
        for name, shape in self.shapes.items():
            views[name] = vector[start : start + shape.numel()].view(shape)
            start += _pad(shape.numel())
        return views

    def renew_working_copy(self) -> None:
        if self.working is not self.values:
            self.working.copy_(self.values)


def group_parameters(model: nn.Module, half: bool, device: torch.device, state: tuple[str, ...]) -> list[ParameterGroup]:
    """Groups with the shapes of a model; all vectors are zero. `state` names the optimiser's state vectors."""
    parameters, kinds = dict(model.named_parameters()), classify_parameters(model)
    grouped = {kind: {name: parameters[name].shape for name in kinds if kinds[name] == kind} for kind in KINDS}
    return [ParameterGroup.of(kind, shapes, half and kind in IN_HALF, device, state) for kind, shapes in grouped.items() if shapes]


def _pad(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
