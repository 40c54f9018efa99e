"""Shaped attention: a stock attention kernel, then identity and centring in one pass of our own.

Autograd alone would write the gradients of the values through the attention, the identity and the centring one by one, and then add them.
Here one autograd function holds all three. It calls the kernel that `scaled_dot_product_attention` would choose, cuDNN's or flash
attention, and `correct` on its result.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shaped.kernels.availability import assume_constant, can_launch, is_ampere_or_later
from shaped.kernels.gpu import launch

Gain = float | Tensor

BLOCK = 64  # tokens of a program
FEATURES = (16, 32, 64, 128, 256)  # of a head
CUDNN = 3  # SDPBackend.CUDNN_ATTENTION, as an integer from _fused_sdp_choice
aten = torch.ops.aten


def reference(q: Tensor, k: Tensor, v: Tensor, gamma1: Gain, gamma2: Gain, scale: float | None, causal: bool) -> Tensor:
    """What `attention` computes, in plain PyTorch, with the m x m matrices written out."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    B = q.new_zeros(q.shape[-2], q.shape[-2])
    if causal:
        B.masked_fill_(torch.ones_like(B, dtype=torch.bool).triu(1), -math.inf)
    plain = torch.softmax(q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + B, -1) @ v
    return plain + gamma1 * v - gamma2 * (torch.softmax(B, -1) @ v)


def fits(q: Tensor, v: Tensor, gamma1: Gain, gamma2: Gain) -> bool:
    """Can `attention` take these? A GPU with flash attention, half precision, gains that are numbers or one for each head."""
    if not can_launch(q):
        return False
    if not all(type(x) in (Tensor, torch.nn.Parameter) for x in (q, v)):  # distributed, fake and other tensors
        return False
    shapes = q.ndim == 4 and v.shape[-1] == q.shape[-1] and q.shape[-1] in FEATURES and q.shape[-2] > 0 and q.shape[0] > 0
    return shapes and has_flash(q.device.index) and all(_is_per_head(gamma, q.shape[1]) for gamma in (gamma1, gamma2))


def attention(q: Tensor, k: Tensor, v: Tensor, gamma1: Gain, gamma2: Gain, scale: float | None, causal: bool) -> Tensor:
    """Shaped attention without a mask or with the causal mask. There must be as many keys as queries."""
    heads = q.shape[1]
    arguments = (q, k, v, *_split_gain(gamma1, heads, v), *_split_gain(gamma2, heads, v), scale, causal)
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
        return Attention.apply(*arguments)
    # A compiler needs a custom operator. In eager mode its overhead would be as large as the kernel's time.
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
        _, _, _, learned1, _, learned2, *_ = ctx.needs_input_grad  # in the order of the arguments of `forward`
        run = backward_op if torch.compiler.is_compiling() else backward
        dq, dk, dv, dgamma = run(do, q, k, v, plain, lse, gamma1, weight1, gamma2, weight2, scale, causal, learned1 or learned2)
        dgamma1 = (weight1 * dgamma[0]).to(gamma1.dtype) if learned1 else None
        dgamma2 = (weight2 * dgamma[1]).to(gamma2.dtype) if learned2 else None
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
    """Shaped attention. With `save` also plain attention and the log-normalisers of its softmax, [batch, heads, tokens]."""
    plain, lse = attend(q, k, v, scale, causal, save)
    out = torch.empty_like(plain) if save else plain
    correct(plain, out, v, v, gamma1, gamma2, weight1, weight2, causal, transposed=False)
    return (out, plain, lse) if save else (out, q.new_empty(0), q.new_empty(0))


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
    """Gradients of q, k and v and, if the gains are learned, of gamma1 and gamma2, [2, heads]."""
    dq, dk, dv = attend_backward(do, q, k, v, plain, lse, scale, causal)
    terms = lse.new_empty(2, q.shape[0] * q.shape[1] * count_blocks(do.shape[-2])) if learned else None
    correct(dv, dv, do, v, gamma1, gamma2, weight1, weight2, causal, transposed=True, dgamma=terms)
    return dq, dk, dv, lse.new_empty(0) if terms is None else terms.view(2, *q.shape[:2], -1).sum((1, 3))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, save: bool) -> tuple[Tensor, Tensor]:
    """Plain attention by the stock kernel and, with `save`, the log-normalisers of its softmax, [batch, heads, tokens]."""
    q, k, v = _with_adjacent_features(q), _with_adjacent_features(k), _with_adjacent_features(v)
    if _prefers_cudnn(q, k, v, scale, causal):
        plain, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, save, 0.0, causal, False, scale=scale)
    else:
        plain, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return plain, lse.view(q.shape[:-1]) if save else lse


def attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, plain: Tensor, lse: Tensor, scale: float | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v through plain attention, from what `attend` returned."""
    m, q, k, v = q.shape[-2], _with_adjacent_features(q), _with_adjacent_features(k), _with_adjacent_features(v)
    if _prefers_cudnn(q, k, v, scale, causal):
        seed = lse.new_empty((), dtype=torch.int64)  # dummy: there is no dropout
        return aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, plain, lse[..., None], seed, seed, None, None, None, m, m, 0.0, causal, scale=scale
        )
    seed = lse.new_empty(2, dtype=torch.uint64)
    return aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, plain, lse, None, None, m, m, 0.0, causal, seed, seed, scale=scale
    )


def correct(
    y: Tensor,
    out: Tensor,
    x: Tensor,
    v: Tensor,
    gamma1: Tensor | None,
    gamma2: Tensor | None,
    weight1: float,
    weight2: float,
    causal: bool,
    transposed: bool,
    gain: Tensor | None = None,
    dgamma: Tensor | tuple[Tensor, Tensor] | None = None,
    dgain: Tensor | None = None,
) -> None:
    """Writes out = gain (y + gamma1 x - gamma2 R x), in place if out is y.

    Forward: y is plain attention, x the values, R x their mean over the tokens that each token attends to.
    Backward (`transposed`): y is the stock kernel's gradient of the values, x the gradient of the output, and R is transposed.
    The gradients of gamma1, gamma2 and gain are sums of terms, one a block of tokens of a head. They are written to `dgamma`, two tensors
    of [batch · heads of x · blocks] entries, and `dgain`, one of [batch · heads of y · blocks].
    """
    from shaped.kernels.gpu.attention_correction import correct_kernel, sum_blocks_kernel

    batch, x_heads, m, D = x.shape
    heads, blocks = y.shape[1], count_blocks(m)
    sums = x.new_empty((batch, x_heads, blocks, D), dtype=torch.float32)
    sizes = (x_heads, m, D, BLOCK, causal and transposed)
    launch(sum_blocks_kernel, batch * x_heads * blocks, x, sums, *x.stride(), *sizes, on=x, num_warps=2)
    launch(
        correct_kernel,
        batch * heads * blocks,
        y,
        out,
        x,
        v,
        sums,
        gamma1,
        gamma2,
        gain,
        *((None, None) if dgamma is None else dgamma),
        dgain,
        0 if gamma1 is None else gamma1.stride(0),
        0 if gamma2 is None else gamma2.stride(0),
        weight1,
        weight2,
        *y.stride(),
        *out.stride(),
        *x.stride(),
        *v.stride(),
        heads,
        m,
        D,
        BLOCK,
        max(heads, x_heads) // min(heads, x_heads),
        causal,
        transposed,
        on=x,
        num_warps=4,
    )


def count_blocks(m: int) -> int:
    """Blocks of m tokens. Each block of a head has one term of a gain's gradient."""
    return -(-m // BLOCK)


GAINS = "Tensor? gamma1, float weight1, Tensor? gamma2, float weight2, float? scale, bool causal"
FORWARD = f"(Tensor q, Tensor k, Tensor v, {GAINS}, bool save) -> (Tensor, Tensor, Tensor)"
BACKWARD = f"(Tensor do, Tensor q, Tensor k, Tensor v, Tensor plain, Tensor lse, {GAINS}, bool learned) -> (Tensor, Tensor, Tensor, Tensor)"


@torch.library.custom_op("shaped::attention", mutates_args=(), device_types="cuda", schema=FORWARD)
def forward_op(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, plain, lse = forward(q, *arguments)
    return _with_strides_of(out, q), _with_strides_of(plain, q) if arguments[-1] else plain, lse


@forward_op.register_fake
def _(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    if not arguments[-1]:
        return torch.empty_like(q), q.new_empty(0), q.new_empty(0)
    return torch.empty_like(q), torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("shaped::attention_backward", mutates_args=(), device_types="cuda", schema=BACKWARD)
def backward_op(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dgamma = backward(do, q, k, v, *arguments)
    return _with_strides_of(dq, q), _with_strides_of(dk, k), _with_strides_of(dv, v), dgamma


@backward_op.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dgamma = q.new_empty((2, q.shape[1]) if arguments[-1] else 0, dtype=torch.float32)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dgamma


def _with_strides_of(x: Tensor, like: Tensor) -> Tensor:
    """x with the strides that `register_fake` promised to the compiler."""
    return x if x.stride() == torch.empty_like(like, device="meta").stride() else torch.empty_like(like).copy_(x)


def _with_adjacent_features(x: Tensor) -> Tensor:
    """The stock kernels need features that are adjacent in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _prefers_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> bool:
    """Would `scaled_dot_product_attention` choose cuDNN, and does its backward kernel take these shapes too?"""
    grouped = q.shape[1] > k.shape[1]
    return (
        q.shape[-2] >= 64
        and q.shape[-1] <= 128
        and aten._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped) == CUDNN
    )


@assume_constant
def has_flash(device: int | None) -> bool:
    """Does the GPU have flash attention, and has the user not disabled it (`torch.nn.attention.sdpa_kernel`)?"""
    return torch.backends.cuda.flash_sdp_enabled() and is_ampere_or_later(device)


def _is_per_head(gamma: Gain, heads: int) -> bool:
    """Is it a number, or a tensor with one entry or one entry for each head?"""
    return not isinstance(gamma, Tensor) or gamma.numel() == 1 or (gamma.numel() == heads and gamma.ndim >= 3 and gamma.shape[-3] == heads)


def _split_gain(gamma: Gain, heads: int, v: Tensor) -> tuple[Tensor | None, float]:
    """A gain as a tensor, one entry for each head, and a factor: (None, number) or (tensor, 1)."""
    if not isinstance(gamma, Tensor):
        return None, float(gamma)
    return gamma.to(v.device).reshape(-1).expand(heads), 1.0
