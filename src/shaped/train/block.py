"""A shaped block forward and backward, written out for the training step on a GPU.

What a compiler makes of the block is slower by a sixth: it adds gradients in passes of their own, which a product can do as it writes its
result, and everything waits for the gradients of the weights, for which nothing waits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shaped.nn.blocks import ShapedTransformerBlock
from shaped.train.products import Product


class Aside:
    """Products that nothing waits for before the end of the backward pass: the gradients of the weights, on a stream of their own."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._used: list[Tensor] = []
        self._before: tuple[list[Tensor], Any] | None = None

    def product(self, dy: Tensor, x: Tensor, gradient: Tensor) -> None:
        """dy' x, written to `gradient`."""
        if not dy.is_cuda:
            torch.mm(dy.t(), x, out=gradient)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(dy.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.mm(dy.t(), x, out=gradient)
        self._used += [dy, x]

    def end_of_block(self, last: bool) -> None:
        """Lets go of what the block before this one has used: memory is given to others in the order of the main stream alone."""
        if self._stream is None:
            return
        main = torch.cuda.current_stream()
        if self._before is not None:
            main.wait_event(self._before[1])
        self._before = self._used, self._stream.record_event()
        self._used = []
        if last:
            main.wait_stream(self._stream)
            self._before = None


class WrittenBlock:
    """A block as a function of its tokens.

    Args:
        block: its matrices must be `Product`s, with queries, keys and values as one.
        otherwise: what is called with tokens that this has not been written for.
        aside: the same for all blocks.
        last: whether its backward pass is the last one.
    """

    def __init__(self, block: nn.Module, otherwise: Any, aside: Aside, last: bool):
        self.block, self.otherwise, self.aside, self.last = block, otherwise, aside, last

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        block = self.block
        if mask is not None or not isinstance(block, ShapedTransformerBlock) or not is_written_for(block, x):
            return self.otherwise(x, mask)
        shaping: Any = block.attention.shaping
        gains = (block.lam_attention, block.gamma_attention, *shaping(), block.lam_feedforward, block.gamma_feedforward)
        return Passes.apply(x, self, *gains, block.feedforward.slope)


def is_written_for(block: ShapedTransformerBlock, x: Tensor) -> bool:
    attention, feedforward = block.attention, block.feedforward
    matrices = (attention.together, attention.output, feedforward.pre, feedforward.post)
    shaped = attention.shaping is not None and feedforward.slope is not None
    return shaped and all(isinstance(matrix, Product) and matrix.weight.dtype == x.dtype for matrix in matrices) and attention.is_short(x)


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, written: WrittenBlock, *gains: Tensor) -> Tensor:
        from shaped.nn import short_kernels
        from shaped.train import block_kernels

        block: Any = written.block
        lam_attention, gamma_attention, gamma1, gamma2, lam_feedforward, gamma_feedforward, slope = gains
        attention, feedforward = block.attention, block.feedforward
        x = x.contiguous()
        rows = x.flatten(0, -2)
        beside = torch.mm(rows, attention.together.weight.t()).unflatten(0, x.shape[:-1])
        mixed, lse = short_kernels.forward(beside, gamma1, gamma2, attention.heads, attention.scale)
        mixed = mixed.flatten(0, -2)
        first = torch.mm(mixed, attention.output.weight.t())
        middle = block_kernels.add(rows, first, lam_attention, gamma_attention)
        hidden = torch.mm(middle, feedforward.pre.weight.t())
        bent = block_kernels.relu(hidden, slope)
        second = torch.mm(bent, feedforward.post.weight.t())
        out = block_kernels.add(middle, second, lam_feedforward, gamma_feedforward)
        ctx.written = written
        ctx.save_for_backward(rows, beside, lse, mixed, first, middle, hidden, bent, second, *gains)
        return out.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        from shaped.nn import short_kernels
        from shaped.train import block_kernels as kernels

        rows, beside, lse, mixed, first, middle, hidden, bent, second, *gains = ctx.saved_tensors
        lam_attention, gamma_attention, gamma1, gamma2, lam_feedforward, gamma_feedforward, slope = gains
        block, aside = ctx.written.block, ctx.written.aside
        attention, feedforward = block.attention, block.feedforward
        residual, shaping = ctx.needs_input_grad[2], ctx.needs_input_grad[4]
        terms: Any = g.new_empty(2, 2, kernels.programs(rows), dtype=torch.float32) if residual else (None, None)
        bends = g.new_empty(kernels.programs(hidden), dtype=torch.float32) if shaping else None

        # The feed-forward branch. What goes past it, dx, is where the product that comes out of it is added.
        dx, dbranch = kernels.add_backward(g.contiguous().flatten(0, -2), middle, second, lam_feedforward, gamma_feedforward, terms[1])
        aside.product(dbranch, bent, feedforward.post.gradient)
        dhidden = kernels.relu_backward(torch.mm(dbranch, feedforward.post.weight), hidden, slope, bends)
        aside.product(dhidden, middle, feedforward.pre.gradient)
        dx.addmm_(dhidden, feedforward.pre.weight)

        dx, dbranch = kernels.add_backward(dx, rows, first, lam_attention, gamma_attention, terms[0])
        aside.product(dbranch, mixed, attention.output.gradient)
        dmixed = torch.mm(dbranch, attention.output.weight)
        dbeside, dgamma = short_kernels.backward(dmixed, beside, lse, gamma1, gamma2, attention.heads, attention.scale, shaping)
        dbeside = dbeside.flatten(0, -2)
        aside.product(dbeside, rows, attention.together.gradient)
        dx.addmm_(dbeside, attention.together.weight)
        aside.end_of_block(ctx.written.last)

        (lam1, gam1), (lam2, gam2) = terms.sum(-1)[..., None] if residual else ((None, None), (None, None))
        one, two = dgamma.sum((0, 2))[:, None] if shaping else (None, None)
        return dx.view_as(g), None, lam1, gam1, one, two, lam2, gam2, None if bends is None else bends.sum()[None]
