"""Copies of a model with fresh weights, drawn as the model's own code draws them."""

from __future__ import annotations

import copy

import torch
from torch import nn

from shaped.checks import fold_seed
from shaped.diagnosis.one_pass.unchanged import keep_random_numbers
from shaped.nn.initialisations import reset_parameters
from shaped.process import quote_error


@torch.inference_mode(False)  # else the copy has no gradients
def make_fresh_copy(model: nn.Module, seed: int) -> nn.Module:
    """The same model with newly drawn weights. The caller's random numbers are not touched.

    transformers' models have `init_weights`, also within a wrapper; elsewhere each module that has parameters must have
    `reset_parameters`. A ValueError names the module that has neither.
    """
    try:
        fresh = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:  # it keeps activations, files or locks as attributes
        said = quote_error(error, 120)
        raise ValueError(f"model must be one that copy.deepcopy can copy, got {type(model).__name__}: {said}") from None
    draw_weights(fresh, seed)
    return fresh


def draw_weights(model: nn.Module, seed: int) -> None:
    """New ones in place, for a copy. The caller's random numbers are not touched."""
    with keep_random_numbers(model):
        torch.manual_seed(fold_seed(seed))
        reset_parameters(model)


def describe_drawing(model: nn.Module) -> str:
    """Who draws the weights of a fresh copy, in words: what a constructor does afterwards is not repeated."""
    own = any(callable(getattr(module, "init_weights", None)) and hasattr(module, "config") for module in model.modules())
    return "drawn by init_weights" if own else "drawn by each module's reset_parameters"
