"""How the matrices of a baseline start, as the theory has them or as the usual models do; and the weights of any model drawn again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from shaped.nn.modules import ShapedFeedForwardBlock, ShapedSelfAttention, init_normal

RESETS = ("reset_parameters", "_reset_parameters")  # PyTorch's names; nn.MultiheadAttention has the second


@dataclass(frozen=True)
class Initialisation:
    about: str
    """A few words for the commands' help."""
    std: float | None = None
    """Standard deviation of every matrix, whatever its width; None: the one that the modules have by themselves."""
    divides_outputs: bool = False
    """Divide that of the residual branches' outputs by sqrt(2 depth)?"""

    def apply(self, attention: ShapedSelfAttention, feedforward: ShapedFeedForwardBlock, depth: int) -> None:
        """Draws the matrices of one block of a stack of this depth again."""
        if self.std is None:
            return
        for matrix in (attention.query, attention.key, attention.value, feedforward.pre):
            init_normal(matrix, self.std)
        for matrix in (attention.output, feedforward.post):
            init_normal(matrix, self.std / math.sqrt(2 * depth) if self.divides_outputs else self.std)


INITIALISATIONS = {
    "theory": Initialisation("outputs keep the inputs' variance"),
    "bert": Initialisation("0.02 everywhere", std=0.02),
    "gpt2": Initialisation("0.02, residual outputs divided by sqrt(2 depth)", std=0.02, divides_outputs=True),
}


@torch.no_grad()
def reset_parameters(model: nn.Module) -> None:
    """Draws all weights of a model again, in place, with PyTorch's global random numbers, as the constructors of its modules draw them.

    A matrix of `shaped.nn` has its own variance; that of its class, `nn.Linear`, is another. Gains get their initial values. Elsewhere
    each module with weights must have `reset_parameters`, which draws all of them, and a model of transformers its `init_weights`.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("model must have its weights in memory, by model.to_empty(device=…), got parameters on the meta device")
    reset_parts("", model)


def reset_parts(name: str, module: Any) -> None:
    """The parts first: some modules draw their parts again in their own way."""
    if callable(getattr(module, "init_weights", None)) and hasattr(module, "config"):
        for part in (*module.modules(), *module.parameters(), *module.buffers()):
            if hasattr(part, "_is_hf_initialized"):  # transformers' mark on what it must not draw again
                del part._is_hf_initialized
        module.init_weights()
        return
    for own, part in reversed(list(module.named_children())):
        reset_parts(f"{name}.{own}" if name else own, part)
    reset_own(name, module)


def reset_own(name: str, module: nn.Module) -> None:
    """The weights of the module itself."""
    draw = find_drawing(module)
    left = list(dict(module.named_parameters(recurse=False))) if draw is None else draw_own(module, draw)
    if left:
        place = f"{name} ({type(module).__name__})" if name else type(module).__name__
        lack = "got none" if draw is None else f"got one that leaves {left[0]} as it was"
        raise ValueError(f"model must have reset_parameters in every module with weights to be drawn again, {lack} in {place}")


def find_drawing(module: nn.Module) -> Callable[[], object] | None:
    """What draws the weights of the module itself, as its constructor does."""
    if isinstance(module, nn.Linear | nn.Embedding) and "std" in module.__dict__:  # a layer of `shaped.nn` keeps its own
        return partial(nn.init.normal_, module.weight, std=module.__dict__["std"])
    return next((method for name in RESETS if callable(method := getattr(module, name, None))), None)


def draw_own(module: nn.Module, draw: Callable[[], object]) -> list[str]:
    """Draws, and returns the names of the weights that were left as they were, such as those of a norm of another weight, or an adapter's.

    They are not a number before, so that what is still none afterwards was left. Those that a part has too were drawn there.
    """
    of_parts = {id(weight) for part in module.children() for weight in part.parameters()}
    own = {name: weight for name, weight in module.named_parameters(recurse=False) if id(weight) not in of_parts and is_plain(weight)}
    before = {name: weight.clone() for name, weight in own.items()}
    left = list(own)
    for weight in own.values():
        weight.fill_(torch.nan)
    try:
        draw()
        left = [name for name, weight in own.items() if weight.isnan().any()]
    finally:
        for name in left:
            own[name].copy_(before[name])
    return left


def is_plain(weight: nn.Parameter) -> bool:
    """Has it entries, in a dtype that has nan?"""
    return not isinstance(weight, UninitializedParameter) and weight.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
