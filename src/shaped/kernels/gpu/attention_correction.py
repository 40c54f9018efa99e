"""Triton sources of `kernels.attention_correction`: gain (y + gamma1 x - gamma2 R x) in one pass over memory.

R x is the mean of x over the tokens that each token attends to. A first, smaller pass computes the sums of x over blocks of tokens.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false, reportCallIssue=false

from __future__ import annotations

from typing import no_type_check  # Triton reads the source of what it compiles: nothing may wrap it, such as the tests' type checks

import triton
import triton.language as tl


@triton.jit
@no_type_check
def sum_blocks_kernel(
    x_ptr, sums_ptr, stride_b, stride_h, stride_m, stride_e, heads, m, D: tl.constexpr, BLOCK: tl.constexpr, HARMONIC: tl.constexpr
):
    """The sum of x over one block of tokens. HARMONIC: the sum of x_i / i, where i counts from 1."""
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
def add_blocks(sums_ptr, lo, hi, D: tl.constexpr):
    """The sum over blocks lo to hi, [D]."""
    total = tl.zeros([16, D], tl.float32)
    for start in range(lo, hi, 16):
        block = start + tl.arange(0, 16)
        total += tl.load(sums_ptr + block[:, None] * D + tl.arange(0, D), mask=(block < hi)[:, None], other=0.0)
    return tl.sum(total, 0)


@triton.jit
@no_type_check
def load_gain(weight, ptr, stride, h):
    """The gain of head h: `weight`, times the tensor's entry if there is a tensor."""
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
    gamma1_ptr,
    gamma2_ptr,
    gain_ptr,
    dgamma1_ptr,
    dgamma2_ptr,
    dgain_ptr,
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
):
    """One block of tokens of one head of y. GROUP query heads share a key head.

    A term of a gain's gradient is written where its pointer is given: x·v for gamma1, -(R x)·v for gamma2, and for the gain of all
    out·v / gain: the attention is linear in the values, so output · gradient of output = value · gradient of value.
    """
    # In reverse order: what the attention kernel wrote last is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    blocks = tl.cdiv(m, BLOCK)
    block, sequence = program % blocks, program // blocks
    b, h = (sequence // heads).to(tl.int64), (sequence % heads).to(tl.int64)
    e = tl.arange(0, D)
    r = tl.arange(0, BLOCK)
    start = block * BLOCK
    i = (start + r).to(tl.int64)[:, None]
    y = tl.load(y_ptr + b * stride_yb + h * stride_yh + i * stride_ym + e * stride_ye, mask=i < m, other=0.0).to(tl.float32)
    gain = 1.0
    if gain_ptr is not None:
        gain = tl.load(gain_ptr).to(tl.float32)
    if dgamma1_ptr is not None or dgain_ptr is not None:
        v = tl.load(v_ptr + b * stride_vb + h * stride_vh + i * stride_vm + e * stride_ve, mask=i < m, other=0.0).to(tl.float32)
    for g in tl.static_range(GROUP if TRANSPOSED else 1):
        x_head = h * GROUP + g if TRANSPOSED else h // GROUP
        x_heads = heads * GROUP if TRANSPOSED else heads // GROUP
        gain_head = x_head if TRANSPOSED else h
        x = tl.load(x_ptr + b * stride_xb + x_head * stride_xh + i * stride_xm + e * stride_xe, mask=i < m, other=0.0)
        sums = sums_ptr + (b * x_heads + x_head) * blocks * D
        if not CAUSAL:
            centring = tl.broadcast_to((add_blocks(sums, 0, blocks, D) / m)[None, :], BLOCK, D)
        elif TRANSPOSED:
            # Sums over this token and all later ones: a product with a triangle of weights 1/i, scaled by the block's first weight.
            # The weights are split into a high and a low part, so that half precision loses none of their float32 digits.
            weights = tl.where(r[:, None] <= r[None, :], ((start + 1.0) / (start + 1 + r))[None, :], 0.0)
            high = weights.to(x.dtype)
            low = (weights - high.to(tl.float32)).to(x.dtype)
            centring = tl.dot(low, x, tl.dot(high, x, input_precision="ieee"), input_precision="ieee") * (1.0 / (start + 1))
            centring += add_blocks(sums, block + 1, blocks, D)[None, :]
        else:
            ones = (r[None, :] <= r[:, None]).to(x.dtype)
            centring = tl.dot(ones, x, input_precision="ieee") + add_blocks(sums, 0, block, D)[None, :]
            centring *= (1.0 / (start + 1 + r))[:, None]
        y += load_gain(weight1, gamma1_ptr, stride_gamma1, gain_head) * x.to(tl.float32)
        y -= load_gain(weight2, gamma2_ptr, stride_gamma2, gain_head) * centring
        if dgamma1_ptr is not None:
            at = (b * x_heads + x_head) * blocks + block
            tl.store(dgamma1_ptr + at, gain * tl.sum(tl.sum(x.to(tl.float32) * v, 1), 0))
            tl.store(dgamma2_ptr + at, -gain * tl.sum(tl.sum(centring * v, 1), 0))
    if dgain_ptr is not None:
        tl.store(dgain_ptr + program, tl.sum(tl.sum(y * v, 1), 0))
    y *= gain
    out = out_ptr + b * stride_ob + h * stride_oh + i * stride_om + e * stride_oe
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=i < m)
