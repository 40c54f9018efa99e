"""Stock attention kernels with identity and centring in one pass after them, forward and backward, on GPUs with Triton.

Left to autograd, the gradients of the values through the attention, the identity and the centring would each be written and then added.
Here one autograd function holds the three. It calls the kernels that `scaled_dot_product_attention` would choose, cuDNN's or flash
attention, and `kernels.correct` on their results.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

Gain = float | Tensor

TRITON = importlib.util.find_spec("triton") is not None
CUDNN = 3  # SDPBackend.CUDNN_ATTENTION, as _fused_sdp_choice gives it
aten = torch.ops.aten


def constant(function: Any) -> Any:
    """`torch.compiler.assume_constant_result`, without importing the compiler for it: that would double the time of `import shaped`."""
    function._dynamo_marked_constant = True
    return function


def fits(q: Tensor, v: Tensor, gamma1: Gain, gamma2: Gain) -> bool:
    """Whether this takes these: on a GPU with flash attention, half precision, gains that are numbers or one for each head."""
    if not (TRITON and q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)):
        return False
    if exporting() or torch._C._are_functorch_transforms_active():
        return False
    if not all(type(x) in (Tensor, torch.nn.Parameter) for x in (q, v)):  # distributed, fake and other tensors
        return False
    D = q.shape[-1]
    shapes = q.ndim == 4 and v.shape[-1] == D and D in (16, 32, 64, 128, 256) and q.shape[-2] > 0 and q.shape[0] > 0
    return shapes and _has_flash(q.device.index) and all(_by_head(gamma, q.shape[1]) for gamma in (gamma1, gamma2))


def exporting() -> bool:
    """Is this for `torch.export`? (Some versions of PyTorch say so under `torch.compile` too.)"""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def attention(q: Tensor, k: Tensor, v: Tensor, gamma1: Gain, gamma2: Gain, scale: float | None, causal: bool) -> Tensor:
    """Shaped attention without a mask or with the causal one, for as many keys as queries."""
    heads = q.shape[1]
    arguments = (q, k, v, *_split(gamma1, heads, v), *_split(gamma2, heads, v), scale, causal)
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
        return Attention.apply(*arguments)
    # A compiler needs an operator, which would cost as much as a kernel when called from here.
    return (forward_op if torch.compiler.is_compiling() else forward)(*arguments, False)[0]


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gamma1: Tensor | None,
        weight1: float,
        gamma2: Tensor | None,
        weight2: float,
        scale: float | None,
        causal: bool,
    ) -> Tensor:
        run = forward_op if torch.compiler.is_compiling() else forward
        out, plain, lse = run(q, k, v, gamma1, weight1, gamma2, weight2, scale, causal, True)
        ctx.save_for_backward(q, k, v, plain, lse, gamma1, gamma2)
        ctx.settings = weight1, weight2, scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, plain, lse, gamma1, gamma2 = ctx.saved_tensors
        weight1, weight2, scale, causal = ctx.settings
        learned1, learned2 = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
        run = backward_op if torch.compiler.is_compiling() else backward
        dq, dk, dv, dgamma = run(do, q, k, v, plain, lse, gamma1, weight1, gamma2, weight2, scale, causal, learned1 or learned2)
        dgamma1 = (weight1 * dgamma[:, 0]).to(gamma1.dtype) if learned1 else None
        dgamma2 = (weight2 * dgamma[:, 1]).to(gamma2.dtype) if learned2 else None
        return dq, dk, dv, dgamma1, None, dgamma2, None, None, None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma1: Tensor | None,
    weight1: float,
    gamma2: Tensor | None,
    weight2: float,
    scale: float | None,
    causal: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shaped attention and, if they are to be saved, plain attention and the logarithms of its normalisers, [batch, heads, tokens]."""
    from shaped.kernels.gpu import attention_correction as kernels

    q, k, v = _rows(q), _rows(k), _rows(v)
    if _prefers_cudnn(q, k, v, scale, causal):
        plain, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, save, 0.0, causal, False, scale=scale)
    else:
        plain, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    out = torch.empty_like(plain) if save else plain
    kernels.correct(plain, out, v, v, gamma1, gamma2, weight1, weight2, causal, transposed=False)
    return (out, plain, lse.view(q.shape[:-1])) if save else (out, q.new_empty(0), q.new_empty(0))


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plain: Tensor,
    lse: Tensor,
    gamma1: Tensor | None,
    weight1: float,
    gamma2: Tensor | None,
    weight2: float,
    scale: float | None,
    causal: bool,
    learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v and, if they are learned, of the gains, [heads, 2]."""
    from shaped.kernels.gpu import attention_correction as kernels

    m, q, k, v = q.shape[-2], _rows(q), _rows(k), _rows(v)
    if _prefers_cudnn(q, k, v, scale, causal):
        seed = lse.new_empty((), dtype=torch.int64)  # of a dropout that there is not
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, plain, lse[..., None], seed, seed, None, None, None, m, m, 0.0, causal, scale=scale
        )
    else:
        seed = lse.new_empty(2, dtype=torch.uint64)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, plain, lse, None, None, m, m, 0.0, causal, seed, seed, scale=scale
        )
    dgamma = kernels.correct(dv, dv, do, v, gamma1, gamma2, weight1, weight2, causal, transposed=True, gains=learned)
    return dq, dk, dv, lse.new_empty(0) if dgamma is None else dgamma


GAINS = "Tensor? gamma1, float weight1, Tensor? gamma2, float weight2, float? scale, bool causal"
FORWARD = f"(Tensor q, Tensor k, Tensor v, {GAINS}, bool save) -> (Tensor, Tensor, Tensor)"
BACKWARD = f"(Tensor do, Tensor q, Tensor k, Tensor v, Tensor plain, Tensor lse, {GAINS}, bool learned) -> (Tensor, Tensor, Tensor, Tensor)"


@torch.library.custom_op("shaped::attention", mutates_args=(), device_types="cuda", schema=FORWARD)
def forward_op(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, plain, lse = forward(q, *arguments)
    return _laid_out(out, q), _laid_out(plain, q) if arguments[-1] else plain, lse


@forward_op.register_fake
def _(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    if not arguments[-1]:
        return torch.empty_like(q), q.new_empty(0), q.new_empty(0)
    return torch.empty_like(q), torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("shaped::attention_backward", mutates_args=(), device_types="cuda", schema=BACKWARD)
def backward_op(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dgamma = backward(do, q, k, v, *arguments)
    return _laid_out(dq, q), _laid_out(dk, k), _laid_out(dv, v), dgamma


@backward_op.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dgamma = q.new_empty((q.shape[1], 2) if arguments[-1] else 0, dtype=torch.float32)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dgamma


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """x with the strides that a compiler was told of."""
    return x if x.stride() == torch.empty_like(like, device="meta").stride() else torch.empty_like(like).copy_(x)


def _rows(x: Tensor) -> Tensor:
    """With features next to each other, as the stock kernels want it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _prefers_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> bool:
    """What `scaled_dot_product_attention` would choose, but only for shapes that cuDNN's backward kernels take too."""
    grouped = q.shape[1] > k.shape[1]
    return (
        q.shape[-2] >= 64
        and q.shape[-1] <= 128
        and aten._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped) == CUDNN
    )


@constant
def _has_flash(device: int | None) -> bool:
    """Also not where the user has asked for other kernels (`torch.nn.attention.sdpa_kernel`)."""
    return torch.version.hip is None and torch.backends.cuda.flash_sdp_enabled() and torch.cuda.get_device_capability(device)[0] >= 8


def _by_head(gamma: Gain, heads: int) -> bool:
    return not isinstance(gamma, Tensor) or gamma.numel() == 1 or (gamma.numel() == heads and gamma.ndim >= 3 and gamma.shape[-3] == heads)


def _split(gamma: Gain, heads: int, v: Tensor) -> tuple[Tensor | None, float]:
    """A gain as one entry for each head, if it is a tensor, and a number."""
    if not isinstance(gamma, Tensor):
        return None, float(gamma)
    return gamma.to(v.device).reshape(-1).expand(heads), 1.0
