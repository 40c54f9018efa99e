"""Which of PyTorch's attention kernels may run: flags of the whole process, set for the duration and restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

BACKENDS = {"flash": "flash_sdp", "cudnn": "cudnn_sdp", "efficient": "mem_efficient_sdp"}
CHOICES = ("auto", *BACKENDS, "math")


@contextmanager
def attention_backend(choice: str, device: torch.device) -> Iterator[None]:
    """Allows one backend on a GPU, or all for "auto". The plain form ("math") is always allowed: it takes what the others refuse."""
    if device.type != "cuda":  # the flags govern the kernels of a CPU too, for which there is no choice
        yield
        return
    flags = torch.backends.cuda
    before = {flag: getattr(flags, f"{flag}_enabled")() for flag in BACKENDS.values()}
    try:
        for name, flag in BACKENDS.items():
            getattr(flags, f"enable_{flag}")(choice in ("auto", name))
        yield
    finally:
        for flag, enabled in before.items():
            getattr(flags, f"enable_{flag}")(enabled)
