"""Shaped or plain attention of short sequences on GPUs with Triton, from the one product that makes queries, keys and values.

At a few hundred tokens or less, stock kernels and what must be done before and after them take several times the time that reading the
queries, keys and values takes. Here it is one kernel forward and one backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shaped.kernels import attention_correction as fused

LONGEST = 128  # tokens, and features of a head: what the matrices of one head may take on the chip


def fits(x: Tensor, D: int) -> bool:
    """Whether this takes the features, D a head, of these tokens, [batch, m, *], in half precision on a GPU."""
    if not (fused.TRITON and x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and x.ndim == 3):
        return False
    if fused.exporting() or torch._C._are_functorch_transforms_active():
        return False
    return 0 < x.shape[1] <= LONGEST and D <= LONGEST and x.shape[0] > 0 and _wanted(x.device.index)


def tile(size: int) -> int:
    """A power of 2, as Triton's tiles must have, with room for this; products of matrices want 16 at least."""
    return max(16, 1 << (size - 1).bit_length())


def chunk(D: int) -> int:
    """Features that are read at a time."""
    return min(32, tile(D))


def attention(qkv: Tensor, gamma1: Tensor | None, gamma2: Tensor | None, heads: int, scale: float) -> Tensor:
    """[batch, m, heads · D]. `gamma1` and `gamma2` are one number each, in a tensor; without them the attention is plain."""
    return forward_op(qkv.contiguous(), gamma1, gamma2, heads, scale)[0]


FORWARD = "(Tensor qkv, Tensor? gamma1, Tensor? gamma2, int heads, float scale) -> (Tensor, Tensor)"
BACKWARD = "(Tensor do, Tensor qkv, Tensor lse, Tensor? gamma1, Tensor? gamma2, int heads, float scale, bool gains) -> (Tensor, Tensor)"


@torch.library.custom_op("shaped::short_attention", mutates_args=(), device_types="cuda", schema=FORWARD)
def forward_op(qkv: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    from shaped.kernels.gpu import short_attention as short_kernels

    return short_kernels.forward(qkv, *arguments)


@forward_op.register_fake
def _(qkv: Tensor, gamma1: Tensor | None, gamma2: Tensor | None, heads: int, scale: float) -> tuple[Tensor, Tensor]:
    batch, m, width = qkv.shape
    return qkv.new_empty(batch, m, width // 3), qkv.new_empty(batch, heads, m, dtype=torch.float32)


@torch.library.custom_op("shaped::short_attention_backward", mutates_args=(), device_types="cuda", schema=BACKWARD)
def backward_op(do: Tensor, qkv: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    from shaped.kernels.gpu import short_attention as short_kernels

    *others, gains = arguments
    dgamma = qkv.new_empty((2, lse.numel()) if gains else (2, 0), dtype=torch.float32)
    return short_kernels.backward(do.contiguous(), qkv, lse, *others, *(dgamma if gains else ())), dgamma


@backward_op.register_fake
def _(do: Tensor, qkv: Tensor, lse: Tensor, gamma1: Any, gamma2: Any, heads: int, scale: float, gains: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(qkv), qkv.new_empty((2, lse.numel()) if gains else (2, 0), dtype=torch.float32)


def _keep(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    qkv, gamma1, gamma2, ctx.heads, ctx.scale = inputs
    ctx.save_for_backward(qkv, output[1], gamma1, gamma2)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, do: Tensor, _: None) -> tuple[Tensor | None, ...]:
    qkv, lse, gamma1, gamma2 = ctx.saved_tensors
    learned = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    dqkv, dgamma = backward_op(do, qkv, lse, gamma1, gamma2, ctx.heads, ctx.scale, learned)
    if not learned:
        return dqkv, None, None, None, None
    one, two = dgamma.sum(1)
    return dqkv, one.view_as(gamma1).to(gamma1.dtype), two.view_as(gamma2).to(gamma2.dtype), None, None


forward_op.register_autograd(_gradients, setup_context=_keep)


@fused.constant
def _wanted(device: int | None) -> bool:
    """Not on GPUs before Ampere, nor where the user has asked for one of PyTorch's own kernels (`torch.nn.attention.sdpa_kernel`)."""
    stock = torch.backends.cuda
    free = stock.flash_sdp_enabled() and stock.cudnn_sdp_enabled() and stock.mem_efficient_sdp_enabled()
    return free and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8
