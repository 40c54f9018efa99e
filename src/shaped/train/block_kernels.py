"""What is done with every entry between the products of a shaped block, and backward: each tensor is read and written once.

Sums over all entries (the gradients of the gains) are left as one term a program, so that they are the same every time.
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
    kept, added = tl.load(lam_ptr) * read(x_ptr, size, BLOCK), tl.load(gamma_ptr) * read(branch_ptr, size, BLOCK)
    write(out_ptr, kept + added, size, BLOCK)


@triton.jit
@no_type_check
def add_backward_kernel(
    g_ptr, x_ptr, branch_ptr, lam_ptr, gamma_ptr, dx_ptr, dbranch_ptr, terms_ptr, size, BLOCK: tl.constexpr, GAINS: tl.constexpr
):  # fmt: skip
    g = read(g_ptr, size, BLOCK)
    write(dx_ptr, tl.load(lam_ptr) * g, size, BLOCK)
    write(dbranch_ptr, tl.load(gamma_ptr) * g, size, BLOCK)
    if GAINS:
        tl.store(terms_ptr + tl.program_id(0), tl.sum(g * read(x_ptr, size, BLOCK), 0))
        tl.store(terms_ptr + tl.num_programs(0) + tl.program_id(0), tl.sum(g * read(branch_ptr, size, BLOCK), 0))


@triton.jit
@no_type_check
def relu_kernel(x_ptr, slope_ptr, out_ptr, size, BLOCK: tl.constexpr):
    x = read(x_ptr, size, BLOCK)
    write(out_ptr, tl.where(x > 0, x, tl.load(slope_ptr) * x), size, BLOCK)


@triton.jit
@no_type_check
def relu_backward_kernel(g_ptr, x_ptr, slope_ptr, dx_ptr, terms_ptr, size, BLOCK: tl.constexpr, GAINS: tl.constexpr):
    g, x = read(g_ptr, size, BLOCK), read(x_ptr, size, BLOCK)
    write(dx_ptr, tl.where(x > 0, g, tl.load(slope_ptr) * g), size, BLOCK)
    if GAINS:
        tl.store(terms_ptr + tl.program_id(0), tl.sum(tl.where(x > 0, 0.0, g * x), 0))


def programs(x: Tensor) -> int:
    return -(-x.numel() // BLOCK)


def add(x: Tensor, branch: Tensor, lam: Tensor, gamma: Tensor) -> Tensor:
    """lam · x + gamma · branch."""
    out = torch.empty_like(x)
    with torch.cuda.device_of(x):
        add_kernel[(programs(x),)](x, branch, lam, gamma, out, x.numel(), BLOCK, num_warps=8)
    return out


def add_backward(g: Tensor, x: Tensor, branch: Tensor | None, lam: Tensor, gamma: Tensor, terms: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of x and branch; those of lam and gamma are the sums of the rows of `terms`, [2, programs]."""
    dx, dbranch = torch.empty_like(g), torch.empty_like(g)
    with torch.cuda.device_of(g):
        add_backward_kernel[(programs(g),)](
            g, x, branch, lam, gamma, dx, dbranch, terms, g.numel(), BLOCK, terms is not None, num_warps=8
        )  # fmt: skip
    return dx, dbranch


def relu(x: Tensor, slope: Tensor) -> Tensor:
    """x where it is positive, slope · x elsewhere."""
    out = torch.empty_like(x)
    with torch.cuda.device_of(x):
        relu_kernel[(programs(x),)](x, slope, out, x.numel(), BLOCK, num_warps=8)
    return out


def relu_backward(g: Tensor, x: Tensor, slope: Tensor, terms: Tensor | None) -> Tensor:
    """The gradient of x; that of the slope is the sum of `terms`, [programs]."""
    dx = torch.empty_like(g)
    with torch.cuda.device_of(g):
        relu_backward_kernel[(programs(g),)](g, x, slope, dx, terms, g.numel(), BLOCK, terms is not None, num_warps=8)
    return dx
