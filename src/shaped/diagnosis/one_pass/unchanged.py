"""A model is observed, not changed: training flags, buffers and random numbers are put back, also after an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shaped.nn.compiled import run_uncompiled


@contextmanager
def keep_random_numbers(model: nn.Module) -> Iterator[None]:
    """The caller's random numbers go on as if nothing had been drawn, on the CPU and on the model's GPUs."""
    devices = {x.device for x in (*model.parameters(), *model.buffers()) if x.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(device.index or 0 for device in devices)):
        yield


@contextmanager
def keep_unchanged(model: nn.Module) -> Iterator[None]:
    """Restores what a forward pass may change. What is compiled runs uncompiled: the compiler would hide what it calls."""
    flags = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    with keep_random_numbers(model), run_uncompiled():
        try:
            yield
        finally:
            for module, training in flags.items():
                module.training = training
            with torch.no_grad():
                for module, name, buffer, before in buffers:
                    module._buffers[name] = buffer  # it may have been replaced
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)
