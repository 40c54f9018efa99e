"""Triton sources of `kernels.relu_matmul_hopper`. Entries beyond the edge of a matrix read as 0 and are not written."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false, reportCallIssue=false

from __future__ import annotations

from typing import no_type_check  # Triton reads the source of what it compiles: nothing may wrap it, such as the tests' type checks

import triton
import triton.language as tl

from shaped.kernels.gpu.relu_matmul import choose_slope


@triton.jit
@no_type_check
def locate_tile(tile, rows, columns, GROUP: tl.constexpr):
    """Row and column of a tile. GROUP rows of tiles are done column by column, so that what they read is still in the cache."""
    first = tile // (GROUP * columns) * GROUP
    high = tl.minimum(rows - first, GROUP)
    remainder = tile % (GROUP * columns)
    return first + remainder % high, remainder // high


@triton.jit
@no_type_check
def split_columns(x):
    """The left half of the columns, and the right half."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
@no_type_check
def write_activated(x, row, column, hidden, out, slope):
    if hidden is not None:
        hidden.store([row, column], x.to(out.dtype))
    out.store([row, column], (x * choose_slope(x, 1.0, slope)).to(out.dtype))


@triton.jit
@no_type_check
def relu_matmul_kernel(
    x,
    weight,
    hidden,
    out,
    slope_ptr,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    slope, rows, columns = tl.load(slope_ptr), tl.cdiv(M, TILE), tl.cdiv(N, TILE)
    done = tl.program_id(0) - PROGRAMS  # a counter of its own, so that the loads of the next tile do not wait for the stores of this one
    for tile in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=True):
        i, j = locate_tile(tile, rows, columns, GROUP)
        y = tl.zeros((TILE, TILE), tl.float32)
        for k in range(tl.cdiv(K, DEPTH)):
            y = tl.dot(x.load([i * TILE, k * DEPTH]), weight.load([j * TILE, k * DEPTH]).T, y)
        done += PROGRAMS
        i, j = locate_tile(done, rows, columns, GROUP)
        left, right = split_columns(y)
        write_activated(left, i * TILE, j * TILE, hidden, out, slope)
        write_activated(right, i * TILE, j * TILE + TILE // 2, hidden, out, slope)


@triton.jit
@no_type_check
def relu_matmul_backward_kernel(
    g,
    weight,
    x,
    dx,
    slope_ptr,
    gamma_ptr,
    gamma_terms_ptr,
    slope_terms_ptr,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATED: tl.constexpr,
):
    i, j = locate_tile(tl.program_id(0), tl.cdiv(M, TILE), tl.cdiv(N, TILE), GROUP)
    dy = tl.zeros((TILE, TILE), tl.float32)
    for k in range(tl.cdiv(K, DEPTH)):
        dy = tl.dot(g.load([i * TILE, k * DEPTH]), weight.load([k * DEPTH, j * TILE]), dy)
    slope, gamma = tl.load(slope_ptr), tl.load(gamma_ptr)
    x = x.load([i * TILE, j * TILE])
    if gamma_terms_ptr is not None:
        product = dy * x.to(tl.float32)
        total = tl.sum(product)
        if not ACTIVATED:
            down = tl.sum(product * choose_slope(x, 0.0, 1.0))
            total += (slope - 1.0) * down
            if slope_terms_ptr is not None:
                tl.store(slope_terms_ptr + tl.program_id(0), gamma * down)
        tl.store(gamma_terms_ptr + tl.program_id(0), total)
    dx.store([i * TILE, j * TILE], (dy * choose_slope(x, gamma, gamma * slope)).to(dx.dtype))
