"""Shaped attention of a short sequence, one program for each head: nothing of size m x m leaves the chip. `short.py` says when.

Queries, keys and values stand beside each other, as one product makes them: [batch, m, 3 (q, k, v), heads, D]. Their gradients are written
the same way. Tiles have M >= m rows and E >= D columns, powers of 2; what is beyond m and D reads as 0.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false, reportCallIssue=false

from __future__ import annotations

from typing import no_type_check  # Triton reads the source of what it compiles: nothing may wrap it, such as the tests' type checks

import torch
import triton
import triton.language as tl
from torch import Tensor

from shaped.nn.short import tile

LOG2E = tl.constexpr(1.4426950408889634)  # powers of 2 are what the hardware has


@triton.jit
@no_type_check
def forward_kernel(qkv_ptr, out_ptr, lse_ptr, gamma1_ptr, gamma2_ptr, scale, heads, m, D: tl.constexpr, M: tl.constexpr, E: tl.constexpr):
    """Also the logarithms (to base 2) of the normalisers."""
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    i, e, n = tl.arange(0, M), tl.arange(0, E), heads * D
    inside = (i < m)[:, None] & (e < D)[None, :]
    at = qkv_ptr + b * m * 3 * n + i[:, None] * 3 * n + h * D + e[None, :]
    q, k, v = tl.load(at, mask=inside, other=0.0), tl.load(at + n, mask=inside, other=0.0), tl.load(at + 2 * n, mask=inside, other=0.0)
    logits = tl.where((i < m)[None, :], tl.dot(q, tl.trans(k)) * (scale * LOG2E), float("-inf"))
    largest = tl.max(logits, 1)
    p = tl.exp2(logits - largest[:, None])
    total = tl.sum(p, 1)
    out = tl.dot(p.to(v.dtype), v) / total[:, None]
    if gamma1_ptr is not None:
        mean = tl.sum(v.to(tl.float32), 0) / m
        out += tl.load(gamma1_ptr).to(tl.float32) * v.to(tl.float32) - tl.load(gamma2_ptr).to(tl.float32) * mean[None, :]
    tl.store(out_ptr + b * m * n + i[:, None] * n + h * D + e[None, :], out.to(v.dtype), mask=inside)
    tl.store(lse_ptr + tl.program_id(0).to(tl.int64) * m + i, largest + tl.log2(total), mask=i < m)


@triton.jit
@no_type_check
def backward_kernel(
    do_ptr,
    qkv_ptr,
    lse_ptr,
    gamma1_ptr,
    gamma2_ptr,
    dqkv_ptr,
    dgamma_ptr,
    scale,
    heads,
    m,
    D: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    GAINS: tl.constexpr,
):
    """Matrices are held transposed, keys by queries, so that only one of them has to be turned. GAINS: also the gradients of the gains."""
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    i, e, n = tl.arange(0, M), tl.arange(0, E), heads * D
    inside = (i < m)[:, None] & (e < D)[None, :]
    place = b * m * 3 * n + i[:, None] * 3 * n + h * D + e[None, :]
    at = qkv_ptr + place
    q, k = tl.load(at, mask=inside, other=0.0), tl.load(at + n, mask=inside, other=0.0)
    do = tl.load(do_ptr + b * m * n + i[:, None] * n + h * D + e[None, :], mask=inside, other=0.0)
    lse = tl.load(lse_ptr + tl.program_id(0).to(tl.int64) * m + i, mask=i < m, other=float("inf"))
    p = tl.exp2(tl.dot(k, tl.trans(q)) * (scale * LOG2E) - lse[None, :])
    p = tl.where((i < m)[:, None], p, 0.0)
    dv = tl.dot(p.to(do.dtype), do)
    v = tl.load(at + 2 * n, mask=inside, other=0.0)
    if gamma1_ptr is not None:
        total = tl.sum(do.to(tl.float32), 0)
        dv += tl.load(gamma1_ptr).to(tl.float32) * do.to(tl.float32) - tl.load(gamma2_ptr).to(tl.float32) * (total / m)[None, :]
        if GAINS:
            mean = tl.sum(v.to(tl.float32), 0) / m
            tl.store(dgamma_ptr + 2 * tl.program_id(0), tl.sum(tl.sum(do.to(tl.float32) * v.to(tl.float32), 1), 0))
            tl.store(dgamma_ptr + 2 * tl.program_id(0) + 1, -tl.sum(total * mean, 0))
    tl.store(dqkv_ptr + place + 2 * n, dv.to(do.dtype), mask=inside)
    dp = tl.dot(v, tl.trans(do))
    ds = (p * (dp - tl.sum(p * dp, 0)[None, :]) * scale).to(do.dtype)
    tl.store(dqkv_ptr + place + n, tl.dot(ds, q).to(do.dtype), mask=inside)
    tl.store(dqkv_ptr + place, tl.dot(tl.trans(ds), k).to(do.dtype), mask=inside)


def forward(qkv: Tensor, gamma1: Tensor | None, gamma2: Tensor | None, heads: int, scale: float) -> tuple[Tensor, Tensor]:
    batch, m, D, sizes = _sizes(qkv, heads)
    out, lse = qkv.new_empty(batch, m, heads * D), qkv.new_empty(batch, heads, m, dtype=torch.float32)
    with torch.cuda.device_of(qkv):
        forward_kernel[(batch * heads,)](qkv, out, lse, gamma1, gamma2, scale, heads, m, D, *sizes, num_warps=8)
    return out, lse


def backward(
    do: Tensor, qkv: Tensor, lse: Tensor, gamma1: Tensor | None, gamma2: Tensor | None, heads: int, scale: float, gains: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of qkv and, if wanted, of each sequence's and head's gains, [batch·heads, 2]."""
    batch, m, D, sizes = _sizes(qkv, heads)
    dqkv, dgamma = torch.empty_like(qkv), qkv.new_empty((batch * heads, 2) if gains else 0, dtype=torch.float32)
    with torch.cuda.device_of(qkv):
        backward_kernel[(batch * heads,)](
            do, qkv, lse, gamma1, gamma2, dqkv, dgamma, scale, heads, m, D, *sizes, gains, num_warps=8
        )  # fmt: skip
    return dqkv, dgamma


def _sizes(qkv: Tensor, heads: int) -> tuple[int, int, int, tuple[int, int]]:
    batch, m, width = qkv.shape
    D = width // (3 * heads)
    return batch, m, D, (tile(m), tile(D))
