"""Copies of a model with fresh weights, drawn as the model's own code draws them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from shaped.diagnosis.one_pass.unchanged import keep_random_numbers
from shaped.process import quote_error

RESETS = ("reset_parameters", "_reset_parameters")  # PyTorch's names; nn.MultiheadAttention has the second


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
    with keep_random_numbers(model), torch.no_grad():
        torch.manual_seed(seed)
        draw_parts("", model)


def draw_parts(name: str, module: Any) -> None:
    """The parts first: some modules draw their parts again in their own way."""
    if callable(getattr(module, "init_weights", None)) and hasattr(module, "config"):
        for part in (*module.modules(), *module.parameters(), *module.buffers()):
            if hasattr(part, "_is_hf_initialized"):  # transformers' mark on what it must not draw again
                del part._is_hf_initialized
        module.init_weights()
        return
    for own, part in reversed(list(module.named_children())):
        draw_parts(f"{name}.{own}" if name else own, part)
    reset(name, module)


def describe_drawing(model: nn.Module) -> str:
    """Who draws the weights of a fresh copy, in words: what a constructor does afterwards is not repeated."""
    own = any(callable(getattr(module, "init_weights", None)) and hasattr(module, "config") for module in model.modules())
    return "drawn by init_weights" if own else "drawn by each module's reset_parameters"


def reset(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding) and "std" in module.__dict__:  # a layer of `shaped.nn` keeps its own
        nn.init.normal_(module.weight, std=module.__dict__["std"])
        return
    for method in RESETS:
        if callable(getattr(module, method, None)):
            getattr(module, method)()
            return
    if next(module.parameters(recurse=False), None) is not None:
        place = f"{name} ({type(module).__name__})" if name else type(module).__name__
        raise ValueError(f"model must have reset_parameters in every module with weights to be drawn again, got none in {place}")
