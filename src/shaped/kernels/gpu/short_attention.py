"""Triton sources of `kernels.short_attention`: one program a head, and no m x m matrix in memory.

Queries, keys and values are read from one tensor, [batch, m, 3 (q, k, v), heads, D]. Their gradients are written in the same layout.
Features are read and written in chunks, some of them twice. Two programs then fit on one multiprocessor: one computes while the other
waits for memory. Tiles have M >= m rows, M a power of 2. Entries beyond m and D read as 0.

QK-norm (`qk_eps` is given) divides each query and each key by its root mean square over the D features: x̂ = x·r, r = (x·x/D + eps)^(-1/2).
`stats` are rows of [batch, heads, m] numbers: the base-2 logarithms of the softmax normalisers and, with QK-norm, r of queries and keys.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false, reportCallIssue=false

from __future__ import annotations

from typing import no_type_check  # Triton reads the source of what it compiles: nothing may wrap it, such as the tests' type checks

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # the hardware computes powers of 2


@triton.jit
@no_type_check
def read(ptr, i, e, stride, m, D: tl.constexpr, C: tl.constexpr):
    """Features e of the tokens i of a head; `stride` is the distance between tokens."""
    inside = (i < m)[:, None] if D % C == 0 else (i < m)[:, None] & (e < D)[None, :]
    return tl.load(ptr + (i[:, None] * stride + e[None, :]), mask=inside, other=0.0)


@triton.jit
@no_type_check
def write(ptr, x, i, e, stride, m, D: tl.constexpr, C: tl.constexpr):
    inside = (i < m)[:, None] if D % C == 0 else (i < m)[:, None] & (e < D)[None, :]
    tl.store(ptr + (i[:, None] * stride + e[None, :]), x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def read_all(ptr, i, e, stride, m, D: tl.constexpr, C: tl.constexpr):
    """All features of the tokens i of a head: a tuple of chunks. The program waits for memory once."""
    chunks = ()
    for c in tl.static_range(0, D, C):
        chunks = chunks + (read(ptr, i, c + e, stride, m, D, C),)  # noqa: RUF005  Triton does not know (*chunks, chunk)
    return chunks


@triton.jit
@no_type_check
def multiply_normalised(q, k, i, e, stride, m, qk_eps, D: tl.constexpr, M: tl.constexpr, C: tl.constexpr):
    """The products of normalised queries and keys, [M, M], and r of both, [M].

    The loop is not pipelined: Triton 3.7 would give one buffer to a chunk that is both multiplied and squared, and load the next chunk into
    it while the product still reads it.
    """
    queries, keys = read_all(q, i, e, stride, m, D, C), read_all(k, i, e, stride, m, D, C)
    products, q_squares, k_squares = tl.zeros([M, M], tl.float32), tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    for c in tl.static_range(0, D, C):
        query, key = queries[c // C].to(tl.float32), keys[c // C].to(tl.float32)
        q_squares += tl.sum(query * query, 1)
        k_squares += tl.sum(key * key, 1)
        products = tl.dot(queries[c // C], tl.trans(keys[c // C]), products)
    q_r, k_r = tl.rsqrt(q_squares / D + qk_eps), tl.rsqrt(k_squares / D + qk_eps)
    return products * q_r[:, None] * k_r[None, :], q_r, k_r


@triton.jit
@no_type_check
def write_normalised_gradient(dx, ds, x, y, x_r_ptr, y_r_ptr, i, e, stride, m, D: tl.constexpr, M: tl.constexpr, C: tl.constexpr):
    """Writes the gradient of x, which are queries or keys. y are the other ones, ds is the gradient of the products x̂ ŷᵀ.

    The gradient of x̂ is g = ds ŷ, and dr/dx = -r³·x/D for every eps. So dx = r·g - r³·x·(x·g)/D = r·(g - r²·(x·g)/D·x).
    All features of g stay in registers until x·g is known. ds is not needed in float32 any more, so they fit.
    """
    x_r, y_r = tl.load(x_r_ptr + i, mask=i < m, other=0.0), tl.load(y_r_ptr + i, mask=i < m, other=0.0)
    others, inputs = read_all(y, i, e, stride, m, D, C), read_all(x, i, e, stride, m, D, C)
    parts, along = (), tl.zeros([M], tl.float32)
    for c in tl.static_range(0, D, C):
        part = tl.dot(ds, (others[c // C].to(tl.float32) * y_r[:, None]).to(ds.dtype))
        along += tl.sum(part * inputs[c // C].to(tl.float32), 1)
        parts = parts + (part,)  # noqa: RUF005  as in `read_all`
    along *= x_r * x_r / D
    for c in tl.static_range(0, D, C):
        part = (parts[c // C] - along[:, None] * inputs[c // C].to(tl.float32)) * x_r[:, None]
        write(dx, part, i, c + e, stride, m, D, C)


@triton.jit
@no_type_check
def short_attention_kernel(
    qkv_ptr,
    out_ptr,
    stats_ptr,
    gamma1_ptr,
    gamma2_ptr,
    gain_ptr,
    scale,
    qk_eps,
    heads,
    m,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
):
    """Writes the output and `stats`."""
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    i, e, n = tl.arange(0, M), tl.arange(0, C), heads * D
    q, out = qkv_ptr + b * m * 3 * n + h * D, out_ptr + b * m * n + h * D
    k, v = q + n, q + 2 * n
    stats, count = stats_ptr + tl.program_id(0).to(tl.int64) * m, tl.num_programs(0).to(tl.int64) * m
    if qk_eps is None:
        logits = tl.zeros([M, M], tl.float32)
        for c in tl.range(0, D, C, num_stages=S):
            logits = tl.dot(read(q, i, c + e, 3 * n, m, D, C), tl.trans(read(k, i, c + e, 3 * n, m, D, C)), logits)
    else:
        logits, q_r, k_r = multiply_normalised(q, k, i, e, 3 * n, m, qk_eps, D, M, C)
        tl.store(stats + count + i, q_r, mask=i < m)
        tl.store(stats + 2 * count + i, k_r, mask=i < m)
    logits = tl.where((i < m)[None, :], logits * (scale * LOG2E), float("-inf"))
    largest = tl.max(logits, 1)
    p = tl.exp2(logits - largest[:, None])
    total = tl.sum(p, 1)
    tl.store(stats + i, largest + tl.log2(total), mask=i < m)
    p *= (1.0 / total)[:, None]
    if gamma1_ptr is not None:  # centring is done in the matrix; the identity is not: beside it, p would lose digits in half precision
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
def short_attention_backward_kernel(
    do_ptr,
    qkv_ptr,
    stats_ptr,
    gamma1_ptr,
    gamma2_ptr,
    gain_ptr,
    dqkv_ptr,
    dgamma1_ptr,
    dgamma2_ptr,
    dgain_ptr,
    scale,
    qk_eps,
    heads,
    m,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
):
    """Writes the gradient of qkv and, where a pointer is given, the terms of a gain's gradient, one a query."""
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    i, e, n = tl.arange(0, M), tl.arange(0, C), heads * D
    half = qkv_ptr.dtype.element_ty
    start = b * m * 3 * n + h * D
    q, dq, do = qkv_ptr + start, dqkv_ptr + start, do_ptr + b * m * n + h * D
    k, v, dk, dv = q + n, q + 2 * n, dq + n, dq + 2 * n
    stats, count = stats_ptr + tl.program_id(0).to(tl.int64) * m, tl.num_programs(0).to(tl.int64) * m
    logits = tl.zeros([M, M], tl.float32)
    for c in tl.range(0, D, C, num_stages=S):
        logits = tl.dot(read(q, i, c + e, 3 * n, m, D, C), tl.trans(read(k, i, c + e, 3 * n, m, D, C)), logits)
    if qk_eps is not None:
        q_r_ptr, k_r_ptr = stats + count, stats + 2 * count
        logits *= tl.load(q_r_ptr + i, mask=i < m, other=0.0)[:, None] * tl.load(k_r_ptr + i, mask=i < m, other=0.0)[None, :]
    lse = tl.load(stats + i, mask=i < m, other=float("inf"))
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
        if dgain_ptr is not None:  # sum of output · gradient, which equals sum of value · its gradient: the output is linear in the values
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
    if dgamma1_ptr is not None:  # gamma1 multiplies the identity, gamma2 the matrix of -1/m
        tl.store(dgamma1_ptr + at, tl.sum(tl.where(i[:, None] == i[None, :], dp, 0.0), 1), mask=i < m)
        tl.store(dgamma2_ptr + at, -tl.sum(dp, 1) / m, mask=i < m)
    ds = (p.to(tl.float32) * (dp - along[:, None]) * scale).to(half)
    if qk_eps is not None:
        write_normalised_gradient(dq, ds, q, k, q_r_ptr, k_r_ptr, i, e, 3 * n, m, D, M, C)
        write_normalised_gradient(dk, tl.trans(ds), k, q, k_r_ptr, q_r_ptr, i, e, 3 * n, m, D, M, C)
    else:
        for c in tl.range(0, D, C, num_stages=S):
            write(dq, tl.dot(ds, read(k, i, c + e, 3 * n, m, D, C)), i, c + e, 3 * n, m, D, C)
        ds = tl.trans(ds)
        for c in tl.range(0, D, C, num_stages=S):
            write(dk, tl.dot(ds, read(q, i, c + e, 3 * n, m, D, C)), i, c + e, 3 * n, m, D, C)
