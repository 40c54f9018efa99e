"""Shaped attention of a short sequence, one program for each head: nothing of size m x m leaves the chip. `short.py` says when.

Queries, keys and values stand beside each other, as one product makes them: [batch, m, 3 (q, k, v), heads, D]. Their gradients are written
the same way. Features are read and written a few at a time, some of them twice: two programs then have room on one multiprocessor, and
one computes while the other waits for its memory. Tiles have M >= m rows, a power of 2; what is beyond m and D reads as 0.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, no_type_check  # Triton reads the source of what it compiles: nothing may wrap it, such as the tests' type checks

import torch
import triton
import triton.language as tl
from torch import Tensor

from shaped.kernels.short_attention import chunk, tile

LOG2E = tl.constexpr(1.4426950408889634)  # powers of 2 are what the hardware has
STAGES = 2  # chunks that are on their way while one is computed with


@triton.jit
@no_type_check
def read(ptr, i, e, apart, m, D: tl.constexpr, C: tl.constexpr):
    """Features e of a head's tokens i, whose rows are `apart`."""
    inside = (i < m)[:, None] if D % C == 0 else (i < m)[:, None] & (e < D)[None, :]
    return tl.load(ptr + (i[:, None] * apart + e[None, :]), mask=inside, other=0.0)


@triton.jit
@no_type_check
def write(ptr, x, i, e, apart, m, D: tl.constexpr, C: tl.constexpr):
    inside = (i < m)[:, None] if D % C == 0 else (i < m)[:, None] & (e < D)[None, :]
    tl.store(ptr + (i[:, None] * apart + e[None, :]), x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def forward_kernel(
    qkv_ptr,
    out_ptr,
    lse_ptr,
    gamma1_ptr,
    gamma2_ptr,
    gain_ptr,
    scale,
    heads,
    m,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
):
    """Also the logarithms (to base 2) of the normalisers."""
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    i, e, n = tl.arange(0, M), tl.arange(0, C), heads * D
    q, out = qkv_ptr + b * m * 3 * n + h * D, out_ptr + b * m * n + h * D
    k, v = q + n, q + 2 * n
    logits = tl.zeros([M, M], tl.float32)
    for c in tl.range(0, D, C, num_stages=S):
        logits = tl.dot(read(q, i, c + e, 3 * n, m, D, C), tl.trans(read(k, i, c + e, 3 * n, m, D, C)), logits)
    logits = tl.where((i < m)[None, :], logits * (scale * LOG2E), float("-inf"))
    largest = tl.max(logits, 1)
    p = tl.exp2(logits - largest[:, None])
    total = tl.sum(p, 1)
    tl.store(lse_ptr + tl.program_id(0).to(tl.int64) * m + i, largest + tl.log2(total), mask=i < m)
    p *= (1.0 / total)[:, None]
    if gamma1_ptr is not None:  # centring is a matter of the matrix; the identity is not, where it would lose digits
        p -= tl.load(gamma2_ptr).to(tl.float32) / m
    p = p.to(qkv_ptr.dtype.element_ty)
    for c in tl.range(0, D, C, num_stages=S):
        value = read(v, i, c + e, 3 * n, m, D, C)
        mixed = tl.dot(p, value)
        if gamma1_ptr is not None:
            mixed += tl.load(gamma1_ptr).to(tl.float32) * value.to(tl.float32)
        if gain_ptr is not None:
            mixed *= tl.load(gain_ptr)
        write(out, mixed, i, c + e, n, m, D, C)


@triton.jit
@no_type_check
def backward_kernel(
    do_ptr,
    qkv_ptr,
    lse_ptr,
    gamma1_ptr,
    gamma2_ptr,
    gain_ptr,
    dqkv_ptr,
    dgamma1_ptr,
    dgamma2_ptr,
    dgain_ptr,
    scale,
    heads,
    m,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
):
    """Also the terms of the gains' gradients, one a query, where there is a place for them."""
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    i, e, n = tl.arange(0, M), tl.arange(0, C), heads * D
    half = qkv_ptr.dtype.element_ty
    start = b * m * 3 * n + h * D
    q, dq, do = qkv_ptr + start, dqkv_ptr + start, do_ptr + b * m * n + h * D
    k, v, dk, dv = q + n, q + 2 * n, dq + n, dq + 2 * n
    logits = tl.zeros([M, M], tl.float32)
    for c in tl.range(0, D, C, num_stages=S):
        logits = tl.dot(read(q, i, c + e, 3 * n, m, D, C), tl.trans(read(k, i, c + e, 3 * n, m, D, C)), logits)
    lse = tl.load(lse_ptr + tl.program_id(0).to(tl.int64) * m + i, mask=i < m, other=float("inf"))
    p = tl.where((i < m)[None, :], tl.exp2(logits * (scale * LOG2E) - lse[:, None]), 0.0)
    centred = p
    if gamma1_ptr is not None:
        centred = p - tl.load(gamma2_ptr).to(tl.float32) / m
    centred, p = tl.trans(centred.to(half)), p.to(half)
    at = tl.program_id(0).to(tl.int64) * m + i
    dgain = tl.zeros([M], tl.float32)
    for c in tl.range(0, D, C, num_stages=S):
        mixed = read(do, i, c + e, n, m, D, C)
        dvalue = tl.dot(centred, mixed)
        if gamma1_ptr is not None:
            dvalue += tl.load(gamma1_ptr).to(tl.float32) * mixed.to(tl.float32)
        if dgain_ptr is not None:  # the sum over outputs and their gradients, which is that over values and theirs
            dgain += tl.sum(dvalue * read(v, i, c + e, 3 * n, m, D, C).to(tl.float32), 1)
        if gain_ptr is not None:
            dvalue *= tl.load(gain_ptr)
        write(dv, dvalue, i, c + e, 3 * n, m, D, C)
    if dgain_ptr is not None:
        tl.store(dgain_ptr + at, dgain, mask=i < m)
    dp = tl.zeros([M, M], tl.float32)
    for c in tl.range(0, D, C, num_stages=S):
        dp = tl.dot(read(do, i, c + e, n, m, D, C), tl.trans(read(v, i, c + e, 3 * n, m, D, C)), dp)
    along = tl.sum(p.to(tl.float32) * dp, 1)
    if gain_ptr is not None:
        dp *= tl.load(gain_ptr)
        along *= tl.load(gain_ptr)
    if dgamma1_ptr is not None:  # of gamma1 times the identity and -gamma2 times 1/m
        tl.store(dgamma1_ptr + at, tl.sum(tl.where(i[:, None] == i[None, :], dp, 0.0), 1), mask=i < m)
        tl.store(dgamma2_ptr + at, -tl.sum(dp, 1) / m, mask=i < m)
    ds = (p.to(tl.float32) * (dp - along[:, None]) * scale).to(half)
    for c in tl.range(0, D, C, num_stages=S):
        write(dq, tl.dot(ds, read(k, i, c + e, 3 * n, m, D, C)), i, c + e, 3 * n, m, D, C)
    ds = tl.trans(ds)
    for c in tl.range(0, D, C, num_stages=S):
        write(dk, tl.dot(ds, read(q, i, c + e, 3 * n, m, D, C)), i, c + e, 3 * n, m, D, C)


def forward(
    qkv: Tensor, gamma1: Tensor | None, gamma2: Tensor | None, heads: int, scale: float, gain: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The tokens, times `gain`, and the logarithms of the normalisers."""
    batch, m, D, sizes = _sizes(qkv, heads)
    out, lse = qkv.new_empty(batch, m, heads * D), qkv.new_empty(batch, heads, m, dtype=torch.float32)
    with torch.cuda.device_of(qkv):
        forward_kernel[(batch * heads,)](qkv, out, lse, gamma1, gamma2, gain, scale, heads, m, D, *sizes, **how(m))
    return out, lse


def backward(
    do: Tensor,
    qkv: Tensor,
    lse: Tensor,
    gamma1: Tensor | None,
    gamma2: Tensor | None,
    heads: int,
    scale: float,
    dgamma1: Tensor | None = None,
    dgamma2: Tensor | None = None,
    gain: Tensor | None = None,
    dgain: Tensor | None = None,
) -> Tensor:
    """The gradient of qkv. Those of the gains are sums of the terms that are written where there is a place for them, [batch·heads·m]."""
    batch, m, D, sizes = _sizes(qkv, heads)
    dqkv = torch.empty_like(qkv)
    gains = (gamma1, gamma2, gain, dqkv, dgamma1, dgamma2, dgain)
    with torch.cuda.device_of(qkv):
        backward_kernel[(batch * heads,)](do, qkv, lse, *gains, scale, heads, m, D, *sizes, **how(m))
    return dqkv


def how(m: int) -> dict[str, Any]:
    """With 128 registers a thread two programs fit on a multiprocessor; 64 of them hold a matrix of 128 x 128."""
    return {"num_warps": 8, "maxnreg": 128} if tile(m) == 128 else {"num_warps": 4}


def _sizes(qkv: Tensor, heads: int) -> tuple[int, int, int, tuple[int, int, int]]:
    batch, m, width = qkv.shape
    D = width // (3 * heads)
    return batch, m, D, (tile(m), chunk(D), STAGES)
