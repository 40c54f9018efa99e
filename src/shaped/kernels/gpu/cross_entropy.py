"""Triton sources of `kernels.chunked_cross_entropy`."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false, reportCallIssue=false

from __future__ import annotations

from typing import no_type_check  # Triton reads the source of what it compiles: nothing may wrap it, such as the tests' type checks

import triton
import triton.language as tl


@triton.jit
@no_type_check
def cross_entropy_kernel(logits_ptr, labels_ptr, losses_ptr, V, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """One program a token: its loss and, with GRADIENT, the gradient of its logits in their place. A negative label is ignored."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    label = tl.load(labels_ptr + row)
    most = tl.full([BLOCK], float("-inf"), tl.float32)  # one running maximum and sum an entry: one reduction at the end
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(most, x)
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # an entry beyond the vocabulary has seen nothing yet
        total = total * tl.exp(most - shift) + tl.exp(x - shift)
        most = larger
    highest = tl.max(most, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(most - highest), 0))
    counts = label >= 0
    own = tl.load(logits_ptr + tl.where(counts, label, 0)).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(counts, lse - own, 0.0))
    if GRADIENT:
        tl.debug_barrier()  # every thread has read the label's logit before another thread overwrites it
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - lse) - tl.where(at == label, 1.0, 0.0)
            tl.store(logits_ptr + at, tl.where(counts, gradient, 0.0).to(logits_ptr.dtype.element_ty), mask=at < V)
