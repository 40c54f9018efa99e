"""A model is observed, not changed: training flags, buffers and random numbers are put back, also after an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn


@contextmanager
def keep_random_numbers(model: nn.Module) -> Iterator[None]:
    """The caller's random numbers go on as if nothing had been drawn, on the CPU and on the model's GPUs."""
    devices = {x.device for x in (*model.parameters(), *model.buffers()) if x.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(device.index or 0 for device in devices)):
        yield


@contextmanager
def keep_unchanged(model: nn.Module) -> Iterator[None]:
    """Restores what a forward pass may change. Compiled parts run uncompiled: the compiler would hide what they call."""
    flags = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    with ExitStack() as stack:
        stack.enter_context(keep_random_numbers(model))
        if any(module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule" for module in model.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
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
