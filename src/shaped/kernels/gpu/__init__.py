"""The Triton sources, one file an operation. Importing one of these files imports Triton, so it is done at the launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, programs: int, *arguments: Any, on: Tensor, **options: Any) -> None:
    """Runs a Triton kernel on the GPU of the tensor `on`, which need not be the current one."""
    with torch.cuda.device_of(on):
        kernel[(programs,)](*arguments, **options)
