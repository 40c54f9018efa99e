"""Copies of a model with fresh weights, drawn as the model's own code draws them."""

from __future__ import annotations

import copy

import torch
from torch import nn

RESETS = ("reset_parameters", "_reset_parameters")  # PyTorch's names; nn.MultiheadAttention has the second


def make_fresh_copy(model: nn.Module, seed: int) -> nn.Module:
    """The same model with newly drawn weights. The caller's random numbers are not touched.

    transformers' models have `init_weights`; in others each module that has parameters must have `reset_parameters`. A ValueError names
    the module that has neither.
    """
    try:
        fresh = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:  # it keeps activations, files or locks as attributes
        said = " ".join(str(error).split())[:120]
        raise ValueError(f"model must be one that copy.deepcopy can copy, got {type(model).__name__}: {said}") from None
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        if callable(getattr(fresh, "init_weights", None)) and hasattr(fresh, "config"):
            for part in (*fresh.modules(), *fresh.parameters(), *fresh.buffers()):
                if hasattr(part, "_is_hf_initialized"):  # transformers' mark on what it must not draw again
                    del part._is_hf_initialized  # pyright: ignore[reportAttributeAccessIssue]
            fresh.init_weights()  # pyright: ignore[reportCallIssue]
        else:
            for name, module in reversed(list(fresh.named_modules())):  # parents last: some draw their parts again in their own way
                reset(name, module)
    return fresh


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
