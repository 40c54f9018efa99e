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
def slopes(x, up, down):
    """Of the ReLU at x: `up` where it is positive, `down` elsewhere."""
    return tl.where(x > 0, up, down)


@triton.jit
@no_type_check
def relu_kernel(x_ptr, slope_ptr, out_ptr, size, BLOCK: tl.constexpr):
    x = read(x_ptr, size, BLOCK)
    write(out_ptr, x * slopes(x, 1.0, tl.load(slope_ptr)), size, BLOCK)


@triton.jit
@no_type_check
def relu_backward_kernel(
    g_ptr, x_ptr, slope_ptr, gamma_ptr, dx_ptr, gamma_terms_ptr, slope_terms_ptr, size, BLOCK: tl.constexpr, BENT: tl.constexpr
):  # fmt: skip
    g, x, slope, gamma = read(g_ptr, size, BLOCK), read(x_ptr, size, BLOCK), tl.load(slope_ptr), tl.load(gamma_ptr)
    if gamma_terms_ptr is not None:
        tl.store(gamma_terms_ptr + tl.program_id(0), tl.sum(g * (x if BENT else x * slopes(x, 1.0, slope)), 0))
    if slope_terms_ptr is not None:
        tl.store(slope_terms_ptr + tl.program_id(0), gamma * tl.sum(g * x * slopes(x, 0.0, 1.0), 0))
    write(dx_ptr, g * slopes(x, gamma, gamma * slope), size, BLOCK)


@triton.jit
@no_type_check
def sums_kernel(terms_ptr, sums_ptr, apart, of_tokens, of_hidden, of_queries, BLOCK: tl.constexpr):
    """Of all rows of `Terms` in one launch, each of its own length."""
    row = tl.program_id(0)
    size = tl.where(row < 2, of_tokens, tl.where((row == 2) | (row == 4), of_hidden, of_queries))
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(terms_ptr + row * apart + at, mask=at < size, other=0.0)
    tl.store(sums_ptr + row, tl.sum(total, 0))


# The gains of a block and where the terms of their gradients come from, in the order in which `sums_kernel` has their rows. The last three
# are the shaping.
SOURCES = {
    "lam_attention": "tokens",
    "lam_feedforward": "tokens",
    "gamma_feedforward": "hidden",
    "gamma_attention": "queries",
    "slope": "hidden",
    "gamma1": "queries",
    "gamma2": "queries",
}


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
    """Of the gradients of a block's gains, and their sums, by name; None for the shaping unless that is wanted.

    Args:
        tokens, hidden, queries: how many terms a gain has that comes from these.
    """

    def __init__(self, tokens: int, hidden: int, queries: int, shaping: bool, device: torch.device):
        self.sizes = tokens, hidden, queries
        self.terms = torch.empty(len(SOURCES) if shaping else len(SOURCES) - 3, max(self.sizes), device=device)
        self.out = self.terms.new_empty(len(self.terms), 1)
        self.of: dict[str, Tensor | None] = dict.fromkeys(SOURCES) | dict(zip(SOURCES, self.terms, strict=False))
        self.sums: dict[str, Tensor | None] = dict.fromkeys(SOURCES) | dict(zip(SOURCES, self.out, strict=False))

    def add(self) -> None:
        with torch.cuda.device_of(self.out):
            sums_kernel[(len(self.out),)](self.terms, self.out, self.terms.shape[1], *self.sizes, BLOCK, num_warps=8)
