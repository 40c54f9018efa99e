"""A feed-forward branch's first product with the ReLU in it, and backward, on Hopper: the hidden features are written once, not twice.

cuBLAS knows no ReLU with a slope. Tiles of 128 x 128 leave room for two programs on a multiprocessor: one multiplies while the other
writes. What is beyond a matrix reads as 0 and is not written.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, no_type_check  # Triton reads the source of what it compiles: nothing may wrap it, such as the tests' type checks

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from shaped.kernels.gpu.residual import slopes

TILE, DEEP, GROUP = 128, 64, 8  # rows and columns of a tile, what is added up at a time, rows of tiles that share what they read


@triton.jit
@no_type_check
def place(tile, rows, columns, GROUP: tl.constexpr):
    """Row and column of a tile: a few rows of tiles at a time, column by column, so that what is read is still near."""
    first = tile // (GROUP * columns) * GROUP
    high = tl.minimum(rows - first, GROUP)
    rest = tile % (GROUP * columns)
    return first + rest % high, rest // high


@triton.jit
@no_type_check
def halves(x):
    """Left and right columns."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
@no_type_check
def bend(x, row, column, hidden, out, slope):
    if hidden is not None:
        hidden.store([row, column], x.to(out.dtype))
    out.store([row, column], (x * slopes(x, 1.0, slope)).to(out.dtype))


@triton.jit
@no_type_check
def feed_kernel(
    x,
    weight,
    hidden,
    out,
    slope_ptr,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    DEEP: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    slope, rows, columns = tl.load(slope_ptr), tl.cdiv(M, TILE), tl.cdiv(N, TILE)
    done = tl.program_id(0) - PROGRAMS  # counted apart, so that the next product does not wait for the end of this one
    for tile in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=True):
        i, j = place(tile, rows, columns, GROUP)
        y = tl.zeros((TILE, TILE), tl.float32)
        for k in range(tl.cdiv(K, DEEP)):
            y = tl.dot(x.load([i * TILE, k * DEEP]), weight.load([j * TILE, k * DEEP]).T, y)
        done += PROGRAMS
        i, j = place(done, rows, columns, GROUP)
        left, right = halves(y)
        bend(left, i * TILE, j * TILE, hidden, out, slope)
        bend(right, i * TILE, j * TILE + TILE // 2, hidden, out, slope)


@triton.jit
@no_type_check
def feed_backward_kernel(
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
    DEEP: tl.constexpr,
    GROUP: tl.constexpr,
    BENT: tl.constexpr,
):
    i, j = place(tl.program_id(0), tl.cdiv(M, TILE), tl.cdiv(N, TILE), GROUP)
    dy = tl.zeros((TILE, TILE), tl.float32)
    for k in range(tl.cdiv(K, DEEP)):
        dy = tl.dot(g.load([i * TILE, k * DEEP]), weight.load([k * DEEP, j * TILE]), dy)
    slope, gamma = tl.load(slope_ptr), tl.load(gamma_ptr)
    x = x.load([i * TILE, j * TILE])
    if gamma_terms_ptr is not None:
        product = dy * x.to(tl.float32)
        total = tl.sum(product)
        if not BENT:
            down = tl.sum(product * slopes(x, 0.0, 1.0))
            total += (slope - 1.0) * down
            if slope_terms_ptr is not None:
                tl.store(slope_terms_ptr + tl.program_id(0), gamma * down)
        tl.store(gamma_terms_ptr + tl.program_id(0), total)
    dx.store([i * TILE, j * TILE], (dy * slopes(x, gamma, gamma * slope)).to(dx.dtype))


def programs(x: Tensor) -> int:
    return -(-x.shape[0] // TILE) * -(-x.shape[1] // TILE)


def feed(x: Tensor, weight: Tensor, slope: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """`block_kernels.feed` in one kernel."""
    out = x.new_empty(len(x), len(weight))
    hidden = torch.empty_like(out) if keep else None
    half = (TILE, TILE // 2)
    count = min(programs(out), 2 * multiprocessors(x.device))
    with torch.cuda.device_of(x):
        feed_kernel[(count,)](
            *tiles((x, (TILE, DEEP)), (weight, (TILE, DEEP)), (hidden, half), (out, half)),
            slope, *out.shape, x.shape[1], TILE, DEEP, GROUP, count, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out, out if hidden is None else hidden


def feed_backward(
    g: Tensor, weight: Tensor, x: Tensor, bent: bool, slope: Tensor, gamma: Tensor, gamma_terms: Tensor | None, slope_terms: Tensor | None
) -> Tensor:
    """`block_kernels.feed_backward` in one kernel."""
    dx = torch.empty_like(x)
    with torch.cuda.device_of(g):
        feed_backward_kernel[(programs(x),)](
            *tiles((g, (TILE, DEEP)), (weight, (DEEP, TILE)), (x, (TILE, TILE)), (dx, (TILE, TILE))),
            slope, gamma, gamma_terms, slope_terms, *x.shape, g.shape[1], TILE, DEEP, GROUP, bent, num_warps=8, num_stages=3, maxnreg=128,
        )  # fmt: skip
    return dx


def tiles(*of: tuple[Tensor | None, tuple[int, int]]) -> list[Any]:
    """As the hardware reads and writes them."""
    return [None if x is None else TensorDescriptor.from_tensor(x, list(shape)) for x, shape in of]


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
