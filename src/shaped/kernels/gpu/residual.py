"""Triton sources of `kernels.residual`."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false, reportCallIssue=false

from __future__ import annotations

from typing import no_type_check  # Triton reads the source of what it compiles: nothing may wrap it, such as the tests' type checks

import triton
import triton.language as tl


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
def residual_kernel(x_ptr, branch_ptr, lam_ptr, gamma_ptr, out_ptr, size, BLOCK: tl.constexpr):
    branch = read(branch_ptr, size, BLOCK)
    if gamma_ptr is not None:
        branch *= tl.load(gamma_ptr)
    write(out_ptr, tl.load(lam_ptr) * read(x_ptr, size, BLOCK) + branch, size, BLOCK)


@triton.jit
@no_type_check
def residual_backward_kernel(g_ptr, x_ptr, lam_ptr, gamma_ptr, dx_ptr, dbranch_ptr, lam_terms_ptr, size, BLOCK: tl.constexpr):
    g = read(g_ptr, size, BLOCK)
    write(dx_ptr, tl.load(lam_ptr) * g, size, BLOCK)
    if gamma_ptr is not None:
        write(dbranch_ptr, tl.load(gamma_ptr) * g, size, BLOCK)
    if lam_terms_ptr is not None:
        tl.store(lam_terms_ptr + tl.program_id(0), tl.sum(g * read(x_ptr, size, BLOCK), 0))


@triton.jit
@no_type_check
def sum_rows_kernel(terms_ptr, sums_ptr, stride, count1, count2, count3, count4, end1, end2, end3, BLOCK: tl.constexpr):
    """The sum of one row. Rows before `end1` have `count1` terms, rows from there to `end2` have `count2`, and so on."""
    row = tl.program_id(0)
    count = tl.where(row < end1, count1, tl.where(row < end2, count2, tl.where(row < end3, count3, count4)))
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(terms_ptr + row * stride + at, mask=at < count, other=0.0)
    tl.store(sums_ptr + row, tl.sum(total, 0))
