"""Triton sources of `kernels.relu_matmul`: the shaped ReLU and its gradients."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false, reportCallIssue=false

from __future__ import annotations

from typing import no_type_check  # Triton reads the source of what it compiles: nothing may wrap it, such as the tests' type checks

import triton
import triton.language as tl

from shaped.kernels.gpu.residual import read, write


@triton.jit
@no_type_check
def choose_slope(x, positive, negative):
    """`positive` where x > 0, `negative` elsewhere."""
    return tl.where(x > 0, positive, negative)


@triton.jit
@no_type_check
def relu_kernel(x_ptr, slope_ptr, out_ptr, size, BLOCK: tl.constexpr):
    x = read(x_ptr, size, BLOCK)
    write(out_ptr, x * choose_slope(x, 1.0, tl.load(slope_ptr)), size, BLOCK)


@triton.jit
@no_type_check
def relu_backward_kernel(
    g_ptr, x_ptr, slope_ptr, gamma_ptr, dx_ptr, gamma_terms_ptr, slope_terms_ptr, size, BLOCK: tl.constexpr, ACTIVATED: tl.constexpr
):  # fmt: skip
    g, x, slope, gamma = read(g_ptr, size, BLOCK), read(x_ptr, size, BLOCK), tl.load(slope_ptr), tl.load(gamma_ptr)
    if gamma_terms_ptr is not None:
        tl.store(gamma_terms_ptr + tl.program_id(0), tl.sum(g * (x if ACTIVATED else x * choose_slope(x, 1.0, slope)), 0))
    if slope_terms_ptr is not None:
        tl.store(slope_terms_ptr + tl.program_id(0), gamma * tl.sum(g * x * choose_slope(x, 0.0, 1.0), 0))
    write(dx_ptr, g * choose_slope(x, gamma, gamma * slope), size, BLOCK)
