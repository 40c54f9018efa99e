"""What is done with every entry between the products of a shaped block, and backward: each tensor is read and written once.

Sums over all entries (the gradients of the gains) are first one term a program, and these are added at the end: the same every time.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false, reportCallIssue=false

from __future__ import annotations

from typing import no_type_check  # Triton reads the source of what it compiles: nothing may wrap it, such as the tests' type checks

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # entries of a program


@triton.jit
@no_type_check
def read(ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return tl.load(ptr + at, mask=at < size, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def write(ptr, x, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=at < size)


@triton.jit
@no_type_check
def add_kernel(x_ptr, branch_ptr, lam_ptr, gamma_ptr, out_ptr, size, BLOCK: tl.constexpr):
    branch = read(branch_ptr, size, BLOCK)
    if gamma_ptr is not None:
        branch *= tl.load(gamma_ptr)
    write(out_ptr, tl.load(lam_ptr) * read(x_ptr, size, BLOCK) + branch, size, BLOCK)


@triton.jit
@no_type_check
def add_backward_kernel(g_ptr, x_ptr, lam_ptr, gamma_ptr, dx_ptr, dbranch_ptr, lam_terms_ptr, size, BLOCK: tl.constexpr):
    g = read(g_ptr, size, BLOCK)
    write(dx_ptr, tl.load(lam_ptr) * g, size, BLOCK)
    if gamma_ptr is not None:
        write(dbranch_ptr, tl.load(gamma_ptr) * g, size, BLOCK)
    if lam_terms_ptr is not None:
        tl.store(lam_terms_ptr + tl.program_id(0), tl.sum(g * read(x_ptr, size, BLOCK), 0))


@triton.jit
@no_type_check
def relu_kernel(x_ptr, slope_ptr, out_ptr, size, BLOCK: tl.constexpr):
    x = read(x_ptr, size, BLOCK)
    write(out_ptr, tl.where(x > 0, x, tl.load(slope_ptr) * x), size, BLOCK)


@triton.jit
@no_type_check
def relu_backward_kernel(
    g_ptr, x_ptr, slope_ptr, gamma_ptr, dx_ptr, gamma_terms_ptr, slope_terms_ptr, size, BLOCK: tl.constexpr, BENT: tl.constexpr
):  # fmt: skip
    g, x, slope, gamma = read(g_ptr, size, BLOCK), read(x_ptr, size, BLOCK), tl.load(slope_ptr), tl.load(gamma_ptr)
    if gamma_terms_ptr is not None:
        tl.store(gamma_terms_ptr + tl.program_id(0), tl.sum(g * (x if BENT else tl.where(x > 0, x, slope * x)), 0))
    g *= gamma
    if slope_terms_ptr is not None:
        tl.store(slope_terms_ptr + tl.program_id(0), tl.sum(tl.where(x > 0, 0.0, g * x), 0))
    write(dx_ptr, tl.where(x > 0, g, slope * g), size, BLOCK)


@triton.jit
@no_type_check
def sums_kernel(terms_ptr, sums_ptr, apart, of_tokens, of_hidden, of_queries, BLOCK: tl.constexpr):
    row = tl.program_id(0)  # as in `Terms`
    size = tl.where(row < 2, of_tokens, tl.where((row == 2) | (row == 4), of_hidden, of_queries))
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(terms_ptr + row * apart + at, mask=at < size, other=0.0)
    tl.store(sums_ptr + row, tl.sum(total, 0))


def programs(x: Tensor) -> int:
    return -(-x.numel() // BLOCK)


def add(x: Tensor, branch: Tensor, lam: Tensor, gamma: Tensor | None) -> Tensor:
    """lam · x + gamma · branch; without gamma the branch has it already."""
    out = torch.empty_like(x)
    with torch.cuda.device_of(x):
        add_kernel[(programs(x),)](x, branch, lam, gamma, out, x.numel(), BLOCK, num_warps=8)
    return out


def add_backward(g: Tensor, x: Tensor, lam: Tensor, gamma: Tensor | None, lam_terms: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the branch; without gamma the second is g itself."""
    dx, dbranch = torch.empty_like(g), g if gamma is None else torch.empty_like(g)
    with torch.cuda.device_of(g):
        add_backward_kernel[(programs(g),)](g, x, lam, gamma, dx, dbranch, lam_terms, g.numel(), BLOCK, num_warps=8)
    return dx, dbranch


def feed(x: Tensor, weight: Tensor, slope: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """relu(x W') with this slope, and x W' if that is to be kept, else the first again."""
    hidden = torch.mm(x, weight.t())
    # Written over itself it is still near when it is read next, and again in the backward pass.
    bent = torch.empty_like(hidden) if keep else hidden
    with torch.cuda.device_of(x):
        relu_kernel[(programs(hidden),)](hidden, slope, bent, hidden.numel(), BLOCK, num_warps=8)
    return bent, hidden


def feed_backward(
    g: Tensor, weight: Tensor, x: Tensor, bent: bool, slope: Tensor, gamma: Tensor, gamma_terms: Tensor | None, slope_terms: Tensor | None
) -> Tensor:
    """The gradient of x of y = gamma · relu(x) W', for that of y, g, and terms of the gains' gradients where there is a place for them.

    `bent`: x is the relu's output already. That is enough where the slope is not negative and has no gradient.
    """
    dx = torch.mm(g, weight)
    with torch.cuda.device_of(g):
        relu_backward_kernel[(programs(x),)](dx, x, slope, gamma, dx, gamma_terms, slope_terms, x.numel(), BLOCK, bent, num_warps=8)
    return dx


class Terms:
    """Of the gradients of a block's gains, a row each: lambda of attention and of feed-forward, gamma of feed-forward and of attention; if
    `shaping`, also the slope, gamma1 and gamma2.

    `sizes`: how many there are that come from the tokens, the hidden features, the queries.
    """

    def __init__(self, sizes: tuple[int, int, int], shaping: bool, device: torch.device):
        self.sizes = sizes
        self.terms = torch.empty(7 if shaping else 4, max(sizes), device=device)
        self.rows: list[Tensor | None] = [*self.terms, *[None] * (7 - len(self.terms))]

        self.out = self.terms.new_empty(len(self.terms), 1)
        self.sums: list[Tensor | None] = [*self.out, *[None] * (7 - len(self.out))]

    def add(self) -> None:
        with torch.cuda.device_of(self.out):
            sums_kernel[(len(self.out),)](self.terms, self.out, self.terms.shape[1], *self.sizes, BLOCK, num_warps=8)
