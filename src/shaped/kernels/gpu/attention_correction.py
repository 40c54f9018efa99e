"""Identity and centring in one pass after the stock attention kernel, in Triton. `fused.py` says when; `attention.py` is the reference.

Forward: y = plain attention, x = the values, R x their mean over what each token sees. Backward (TRANSPOSED): y = the stock kernel's
gradient of the values, x = the gradient of the output, R the transpose. Both are y + gamma1 x - gamma2 R x: memory is read and written
once, next to a first, smaller pass for the sums of x over blocks of tokens.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false, reportCallIssue=false

from __future__ import annotations

from typing import no_type_check  # Triton reads the source of what it compiles: nothing may wrap it, such as the tests' type checks

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # tokens of one program


@triton.jit
@no_type_check
def block_sums(
    x_ptr, sums_ptr, stride_b, stride_h, stride_m, stride_e, heads, m, D: tl.constexpr, BLOCK: tl.constexpr, HARMONIC: tl.constexpr
):
    """The sum of one block of x; HARMONIC: of x_i / i, with i from 1."""
    blocks = tl.cdiv(m, BLOCK)
    sequence = tl.program_id(0) // blocks
    b, h = (sequence // heads).to(tl.int64), (sequence % heads).to(tl.int64)
    e = tl.arange(0, D)
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at = x_ptr + b * stride_b + h * stride_h + i.to(tl.int64)[:, None] * stride_m + e * stride_e
    x = tl.load(at, mask=(i < m)[:, None], other=0.0).to(tl.float32)
    if HARMONIC:
        x *= (1.0 / (i + 1))[:, None]
    tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * D + e, tl.sum(x, 0))


@triton.jit
@no_type_check
def sum_of_blocks(sums_ptr, lo, hi, D: tl.constexpr):
    """The sum over blocks lo to hi, [D]."""
    total = tl.zeros([16, D], tl.float32)
    for start in range(lo, hi, 16):
        block = start + tl.arange(0, 16)
        total += tl.load(sums_ptr + block[:, None] * D + tl.arange(0, D), mask=(block < hi)[:, None], other=0.0)
    return tl.sum(total, 0)


@triton.jit
@no_type_check
def gain(weight, ptr, stride, h):
    """The gain of head h: a number, times a tensor's entry where there is one."""
    if ptr is not None:
        weight = weight * tl.load(ptr + h * stride).to(tl.float32)
    return weight


@triton.jit
@no_type_check
def correct_kernel(
    y_ptr,
    out_ptr,
    x_ptr,
    v_ptr,
    sums_ptr,
    dgamma_ptr,
    gamma1_ptr,
    gamma2_ptr,
    stride_gamma1,
    stride_gamma2,
    weight1,
    weight2,
    stride_yb,
    stride_yh,
    stride_ym,
    stride_ye,
    stride_ob,
    stride_oh,
    stride_om,
    stride_oe,
    stride_xb,
    stride_xh,
    stride_xm,
    stride_xe,
    stride_vb,
    stride_vh,
    stride_vm,
    stride_ve,
    heads,
    m,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    GAINS: tl.constexpr,
):
    """One block of tokens of one of y's `heads`. GROUP heads share a key head. GAINS: also the gradients of the gains, x·v and -(R x)·v."""
    # From the end, since what the attention kernel wrote last is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    blocks = tl.cdiv(m, BLOCK)
    block, sequence = program % blocks, program // blocks
    b, h = (sequence // heads).to(tl.int64), (sequence % heads).to(tl.int64)
    e = tl.arange(0, D)
    r = tl.arange(0, BLOCK)
    start = block * BLOCK
    i = (start + r).to(tl.int64)[:, None]
    y = tl.load(y_ptr + b * stride_yb + h * stride_yh + i * stride_ym + e * stride_ye, mask=i < m, other=0.0).to(tl.float32)
    if GAINS:
        v = tl.load(v_ptr + b * stride_vb + h * stride_vh + i * stride_vm + e * stride_ve, mask=i < m, other=0.0).to(tl.float32)
    for g in tl.static_range(GROUP if TRANSPOSED else 1):
        x_head = h * GROUP + g if TRANSPOSED else h // GROUP
        x_heads = heads * GROUP if TRANSPOSED else heads // GROUP
        gain_head = x_head if TRANSPOSED else h
        x = tl.load(x_ptr + b * stride_xb + x_head * stride_xh + i * stride_xm + e * stride_xe, mask=i < m, other=0.0)
        sums = sums_ptr + (b * x_heads + x_head) * blocks * D
        if not CAUSAL:
            rest = tl.broadcast_to((sum_of_blocks(sums, 0, blocks, D) / m)[None, :], BLOCK, D)
        elif TRANSPOSED:
            # Sums from each token on, by a triangle of weights 1/i relative to the block's first, in two halves to be as exact as float32.
            weights = tl.where(r[:, None] <= r[None, :], ((start + 1.0) / (start + 1 + r))[None, :], 0.0)
            high = weights.to(x.dtype)
            low = (weights - high.to(tl.float32)).to(x.dtype)
            rest = tl.dot(low, x, tl.dot(high, x, input_precision="ieee"), input_precision="ieee") * (1.0 / (start + 1))
            rest += sum_of_blocks(sums, block + 1, blocks, D)[None, :]
        else:
            ones = (r[None, :] <= r[:, None]).to(x.dtype)
            rest = tl.dot(ones, x, input_precision="ieee") + sum_of_blocks(sums, 0, block, D)[None, :]
            rest *= (1.0 / (start + 1 + r))[:, None]
        y += gain(weight1, gamma1_ptr, stride_gamma1, gain_head) * x.to(tl.float32)
        y -= gain(weight2, gamma2_ptr, stride_gamma2, gain_head) * rest
        if GAINS:
            at = dgamma_ptr + ((b * x_heads + x_head) * blocks + block) * 2
            tl.store(at, tl.sum(tl.sum(x.to(tl.float32) * v, 1), 0))
            tl.store(at + 1, -tl.sum(tl.sum(rest * v, 1), 0))
    out = out_ptr + b * stride_ob + h * stride_oh + i * stride_om + e * stride_oe
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=i < m)


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
    gains: bool = False,
) -> Tensor | None:
    """out = y + gamma1 x - gamma2 R x, where out may be y. The gradients of the gains, [heads, 2], if wanted."""
    batch, x_heads, m, D = x.shape
    heads = y.shape[1]
    blocks = -(-m // BLOCK)
    sums = x.new_empty((batch, x_heads, blocks, D), dtype=torch.float32)
    dgamma = x.new_empty((batch, x_heads, blocks, 2), dtype=torch.float32) if gains else None
    with torch.cuda.device(x.device):
        block_sums[(batch * x_heads * blocks,)](x, sums, *x.stride(), x_heads, m, D, BLOCK, causal and transposed, num_warps=2)
        correct_kernel[(batch * heads * blocks,)](
            y,
            out,
            x,
            v,
            sums,
            dgamma,
            gamma1,
            gamma2,
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
            gains,
            num_warps=4,
        )
    return None if dgamma is None else dgamma.sum((0, 2))
