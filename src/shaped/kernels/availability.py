"""Where the kernels can run: is Triton installed, which GPU is it, is a tracer or transform active?"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

TRITON = importlib.util.find_spec("triton") is not None


def assume_constant(function: Any) -> Any:
    """`torch.compiler.assume_constant_result`, without importing the compiler: that would double the time of `import shaped`."""
    function._dynamo_marked_constant = True
    return function


def is_exporting() -> bool:
    """Is `torch.export` tracing? Some versions of PyTorch set the flag under `torch.compile` too, which is not an export."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def can_launch(x: Tensor) -> bool:
    """Can a Triton kernel read x? It must be on a GPU, in half precision, outside of `torch.export` and functorch transforms."""
    if not (TRITON and x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)):
        return False
    return not (is_exporting() or torch._C._are_functorch_transforms_active())


def is_ampere_or_later(device: int | None) -> bool:
    """Is it an NVIDIA GPU of compute capability 8 or more? Older ones have neither flash attention nor bfloat16."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8


@cache
def is_hopper(device: int) -> bool:
    """Is it a Hopper GPU, with a Triton version that the Hopper kernels were tested with?"""
    import triton

    return torch.cuda.get_device_capability(device)[0] == 9 and [int(part) for part in triton.__version__.split(".")[:2]] >= [3, 6]
