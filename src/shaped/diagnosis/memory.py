"""The memory of a diagnosis, before it is taken: Linux kills a process that takes too much, without a word."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from shaped.process import check_memory, find_free_memory

PREDICT = "`shaped predict`, which makes no weights"


def check_config(kind: Any, config: Any, *, drawn: bool) -> None:
    """Refuses a config of transformers whose weights and gradients would not fit; before it is built. `drawn`: no folder has its weights.

    What cannot be built without memory is not refused, nor what is quantised or has no dtype: its files say how large it is.
    """
    if getattr(config, "quantization_config", None) or (not drawn and config.dtype is None):
        return
    try:
        with torch.device("meta"):
            model = kind.from_config(copy.deepcopy(config))
    except Exception:  # some constructors compute with their weights
        return
    count, needed = sum(parameter.numel() for parameter in model.parameters()), 2 * count_bytes(model)
    remedies = ["fewer layers"] if drawn else []
    if model.dtype == torch.float32 and needed / 2 <= (find_free_memory() or 0):
        remedies.append('"dtype": "bfloat16" in its config.json')
    if drawn and is_predicted(config):
        remedies.append(PREDICT)
    what = f"{count / 1e9:.3g} billion weights and gradients"
    check_memory("model", what, needed, ", or ".join(remedies) or "a machine with more memory")


def check_gradients(model: nn.Module) -> None:
    """Refuses a model in memory whose gradients would not fit beside it. A GPU says itself that it is full."""
    here = [p for p in model.parameters() if p.device.type == "cpu" and p.requires_grad and p.ndim >= 2]
    trained = sum(p.numel() * p.element_size() for p in here)
    check_memory("model", "gradients", trained, "fewer layers, or weights in torch.bfloat16")


def find_lack_of_copies(model: nn.Module) -> str:
    """Why no copy with fresh weights can be made, in words; empty if memory has room for one and its gradients."""
    needed, free = 2 * sum(p.numel() * p.element_size() for p in model.parameters() if p.device.type == "cpu"), find_free_memory()
    if free is None or needed <= free:
        return ""
    return f"a copy and its gradients take {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB of memory are free"


def count_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def is_predicted(config: Any) -> bool:
    from shaped.hf.prediction.families import FAMILIES

    return getattr(config, "model_type", None) in FAMILIES
