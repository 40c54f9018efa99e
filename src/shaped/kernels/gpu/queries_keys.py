"""Triton sources of `kernels.long_attention`: QK-norm and rotary positions of all queries and keys in one pass over memory.

Both are read from the product of queries, keys and values, [batch, m, 3 (q, k, v), heads, D], and written as
[batch, m, 2 (q, k), heads, D]. A program has a block of T tokens of one head. Features i and i + D/2 are rotated together, so a row is
read as two halves.

QK-norm: x̂ = x·r, r = (x·x/D + eps)^(-1/2). Its trained gains multiply the features of x̂, one vector for the queries of all heads and one
for the keys. Rotation: (a, b) -> (a·cos - b·sin, b·cos + a·sin). Each is left out where its argument is None.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false, reportCallIssue=false

from __future__ import annotations

from typing import no_type_check  # Triton reads the source of what it compiles: nothing may wrap it, such as the tests' type checks

import triton
import triton.language as tl


@triton.jit
@no_type_check
def read_halves(ptr, i, e, stride, m, D: tl.constexpr):
    at, inside = ptr + i.to(tl.int64)[:, None] * stride + e[None, :], (i < m)[:, None]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32), tl.load(at + D // 2, mask=inside, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def write_halves(ptr, one, two, i, e, stride, m, D: tl.constexpr):
    at, inside = ptr + i.to(tl.int64)[:, None] * stride + e[None, :], (i < m)[:, None]
    tl.store(at, one.to(ptr.dtype.element_ty), mask=inside)
    tl.store(at + D // 2, two.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def read_table(ptr, b, i, e, stride_b, m, D: tl.constexpr):
    """Cosines or sines of the tokens i."""
    return tl.load(ptr + b * stride_b + i[:, None] * (D // 2) + e[None, :], mask=(i < m)[:, None], other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def read_gain(ptr, e, D: tl.constexpr):
    """A vector of trained gains, as two halves."""
    return tl.load(ptr + e).to(tl.float32)[None, :], tl.load(ptr + D // 2 + e).to(tl.float32)[None, :]


@triton.jit
@no_type_check
def find_place(heads, m, T: tl.constexpr):
    """Sequence, head and tokens of the program. Heads come first: their programs share the tokens' cosines and sines."""
    blocks = tl.cdiv(m, T)
    h, block = tl.program_id(0) % heads, tl.program_id(0) // heads % blocks
    return (tl.program_id(0) // heads // blocks).to(tl.int64), h.to(tl.int64), block * T + tl.arange(0, T)


@triton.jit
@no_type_check
def prepare_kernel(qkv_ptr, out_ptr, cos_ptr, sin_ptr, query_ptr, key_ptr, qk_eps, stride_b, heads, m, D: tl.constexpr, T: tl.constexpr):
    b, h, i = find_place(heads, m, T)
    e, n = tl.arange(0, D // 2), heads * D
    if cos_ptr is not None:
        cos, sin = read_table(cos_ptr, b, i, e, stride_b, m, D), read_table(sin_ptr, b, i, e, stride_b, m, D)
    for part in tl.static_range(2):
        at = part * n + h * D
        one, two = read_halves(qkv_ptr + b * m * 3 * n + at, i, e, 3 * n, m, D)
        if qk_eps is not None:
            r = tl.rsqrt((tl.sum(one * one, 1) + tl.sum(two * two, 1)) / D + qk_eps)[:, None]
            one, two = one * r, two * r
        if query_ptr is not None:
            gain_one, gain_two = read_gain(query_ptr if part == 0 else key_ptr, e, D)
            one, two = one * gain_one, two * gain_two
        if cos_ptr is not None:
            one, two = one * cos - two * sin, two * cos + one * sin
        write_halves(out_ptr + b * m * 2 * n + at, one, two, i, e, 2 * n, m, D)


@triton.jit
@no_type_check
def prepare_backward_kernel(
    dq_ptr,
    dk_ptr,
    qkv_ptr,
    dqkv_ptr,
    cos_ptr,
    sin_ptr,
    gain_ptr,
    query_ptr,
    key_ptr,
    dquery_ptr,
    dkey_ptr,
    qk_eps,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_km,
    stride_b,
    stride_terms,
    heads,
    m,
    D: tl.constexpr,
    T: tl.constexpr,
):
    """Writes gain times the gradient of queries and keys.

    Rotated back it is the gradient h of w∘x̂, where w are the trained gains. That of w is the sum of h∘x̂ over all tokens and heads: each
    program writes a term for every feature, where a pointer is given; `stride_terms` is the distance between features. That of x̂ is
    g = w∘h, and dx = r·(g - r²·(x·g)/D·x).
    """
    b, h, i = find_place(heads, m, T)
    e, n = tl.arange(0, D // 2), heads * D
    if cos_ptr is not None:
        cos, sin = read_table(cos_ptr, b, i, e, stride_b, m, D), read_table(sin_ptr, b, i, e, stride_b, m, D)
    for part in tl.static_range(2):
        at = b * m * 3 * n + part * n + h * D
        if part == 0:
            one, two = read_halves(dq_ptr + b * stride_qb + h * stride_qh, i, e, stride_qm, m, D)
        else:
            one, two = read_halves(dk_ptr + b * stride_kb + h * stride_kh, i, e, stride_km, m, D)
        if cos_ptr is not None:
            one, two = one * cos + two * sin, two * cos - one * sin
        if qk_eps is not None:
            x, y = read_halves(qkv_ptr + at, i, e, 3 * n, m, D)
            r = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + qk_eps)
            if dquery_ptr is not None:
                inside = tl.where(i < m, r, 0.0)[:, None]  # beyond m, r may be infinite
                gain = tl.load(gain_ptr).to(tl.float32)
                terms = (dquery_ptr if part == 0 else dkey_ptr) + e * stride_terms + tl.program_id(0)
                tl.store(terms, gain * tl.sum(one * x * inside, 0))
                tl.store(terms + D // 2 * stride_terms, gain * tl.sum(two * y * inside, 0))
            if query_ptr is not None:
                gain_one, gain_two = read_gain(query_ptr if part == 0 else key_ptr, e, D)
                one, two = one * gain_one, two * gain_two
            along = ((tl.sum(x * one, 1) + tl.sum(y * two, 1)) * r * r / D)[:, None]
            one, two = (one - along * x) * r[:, None], (two - along * y) * r[:, None]
        if gain_ptr is not None:
            one, two = one * tl.load(gain_ptr).to(tl.float32), two * tl.load(gain_ptr).to(tl.float32)
        write_halves(dqkv_ptr + at, one, two, i, e, 3 * n, m, D)
