"""A shaped block forward and backward, written out for the training step on a GPU.

A compiler adds gradients in passes of their own, which a product can do as it writes its result, and lets everything wait for the gradients
of the weights, for which nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shaped.nn.blocks import ShapedTransformerBlock
from shaped.train.step.direct_gradients import DirectLinear


class Aside:
    """What nothing waits for before the end of the backward pass, on a stream of its own: gradients of weights and gains."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._captured = False
        self._used: list[Tensor] = []
        self._before: tuple[list[Tensor], Any] | None = None

    def product(self, dy: Tensor, x: Tensor, gradient: Tensor) -> None:
        """dy' x, written to `gradient`."""
        self.do(lambda: torch.mm(dy.t(), x, out=gradient), dy, x)

    def do(self, work: Callable[[], object], *used: Tensor) -> None:
        """What has been begun so far is done before it. The memory of `used` is kept; nobody may write to it before the next block has
        ended, and nobody reads what is made before the pass has."""
        if not used[0].is_cuda:
            work()
            return
        captured = torch.cuda.is_current_stream_capturing()
        if self._stream is None or captured != self._captured:  # a graph's has its cuBLAS workspace in the graph's own memory
            self._stream, self._captured = torch.cuda.Stream(used[0].device), captured
        self._used += used
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()

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
            self.join()

    def join(self) -> None:
        """Lets the main stream wait for all that was begun; also where a pass broke off, since a capture ends with one stream."""
        begun = self._used or self._before is not None
        self._used, self._before = [], None  # first: after a capture that failed, waiting does too
        if self._stream is not None and begun:
            torch.cuda.current_stream().wait_stream(self._stream)


class WrittenBlock:
    """A block as a function of its tokens.

    Args:
        block: one that `can_be_written`.
        otherwise: what is called with tokens that this has not been written for.
        aside: the same for all blocks.
        last: whether its backward pass is the last one.
    """

    def __init__(self, block: Any, otherwise: Any, aside: Aside, last: bool):
        self.block, self.otherwise, self.aside, self.last = block, otherwise, aside, last

    def __call__(self, x: Tensor, mask: Tensor | None = None, attend: None = None, places: Tensor | None = None) -> Tensor:
        """`places` as in `ShapedTransformerBlock`."""
        block = self.block
        if mask is not None or x.dtype != block.attention.output.weight.dtype or not block.attention.is_short(x):
            return self.otherwise(x, mask, attend, places)
        gains = (block.lam_attention, block.gamma_attention, *block.attention.shaping(), block.lam_feedforward, block.gamma_feedforward)
        return Passes.apply(x, places, self, *gains, block.feedforward.slope)


def can_be_written(blocks: Sequence[nn.Module]) -> bool:
    """Are all of them shaped ones, with weights and gains of their own, and one product for queries, keys and values?"""
    if not all(isinstance(block, ShapedTransformerBlock) and _is_simple(block) for block in blocks):
        return False
    trained = [id(gain) for block in blocks for gain in block.parameters() if gain.numel() == 1]
    return len(set(trained)) == len(trained)  # what two blocks share autograd adds up, before it is made


def _is_simple(block: ShapedTransformerBlock) -> bool:
    attention, feedforward = block.attention, block.feedforward
    matrices = (attention.together, attention.output, feedforward.pre, feedforward.post)
    if attention.shaping is None or feedforward.slope is None or not all(isinstance(matrix, DirectLinear) for matrix in matrices):
        return False
    learns = {gain.requires_grad for gain in (*attention.shaping.scalars(), feedforward.slope)}
    return learns == {True} or (learns == {False} and feedforward.start >= 0.0)  # the sign of what goes in is read from what comes out


def feeding(x: Tensor, weight: Tensor) -> Any:
    """The functions `feed` and `feed_backward` for these: in one kernel where that has been seen to be faster."""
    from shaped.kernels.gpu import residual as block_kernels

    if x.is_cuda and x.dtype.itemsize == 2 and all(size % 8 == 0 for size in weight.shape) and is_hopper(x.device.index):
        from shaped.kernels.gpu import relu_matmul_hopper as bent_kernels

        return bent_kernels
    return block_kernels


@cache
def is_hopper(device: int) -> bool:
    """With a Triton like those that this has been tried with."""
    import triton

    return torch.cuda.get_device_capability(device)[0] == 9 and [int(part) for part in triton.__version__.split(".")[:2]] >= [3, 6]


NAMES = ("lam_attention", "gamma_attention", "gamma1", "gamma2", "lam_feedforward", "gamma_feedforward", "slope")
GAINS, SLOPE = 3, 9  # where they begin among the arguments of what follows, and the last of them


class Passes(torch.autograd.Function):
    """Eq. shaped_transformer and its gradients. Those of the weights are written where their `DirectLinear` has them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor | None, written: WrittenBlock, *gains: Tensor) -> Tensor:
        from shaped.kernels.gpu import residual as kernels
        from shaped.kernels.gpu import short_attention as short_kernels

        block: Any = written.block
        lam_attention, gamma_attention, gamma1, gamma2, lam_feedforward, gamma_feedforward, slope = gains
        attention, feedforward = block.attention, block.feedforward
        x = x.contiguous()
        rows = x.flatten(0, -2)
        beside = torch.mm(rows, attention.together.weight.t()).unflatten(0, x.shape[:-1])
        mixed, lse = short_kernels.forward(beside, gamma1, gamma2, attention.heads, attention.scale, gamma_attention)
        mixed, tokens, at = mixed.flatten(0, -2), rows, None
        if places is not None:  # from here on, nothing else is needed
            at = (places + x.shape[1] * torch.arange(len(x), device=x.device)[:, None]).flatten()
            mixed, tokens = mixed.index_select(0, at), rows.index_select(0, at)
        middle = kernels.add(tokens, torch.mm(mixed, attention.output.weight.t()), lam_attention, None)
        bent, hidden = feeding(middle, feedforward.pre.weight).feed(middle, feedforward.pre.weight, slope, keep=ctx.needs_input_grad[SLOPE])
        branch = torch.mm(bent, feedforward.post.weight.t())
        ctx.written = written
        ctx.save_for_backward(rows, beside, lse, at, mixed, tokens, middle, hidden, bent, *gains)
        return kernels.add(middle, branch, lam_feedforward, gamma_feedforward).unflatten(0, (len(x), -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            return Passes.gradients(ctx, dy)
        except BaseException:
            with suppress(RuntimeError):  # of which there has been one already
                ctx.written.aside.join()
            raise

    @staticmethod
    def gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from shaped.kernels.gpu import residual as kernels
        from shaped.kernels.gpu import short_attention as short_kernels

        rows, beside, lse, at, mixed, tokens, middle, hidden, bent, *gains = ctx.saved_tensors
        lam_attention, gamma_attention, gamma1, gamma2, lam_feedforward, gamma_feedforward, slope = gains
        block, aside = ctx.written.block, ctx.written.aside
        attention, feedforward = block.attention, block.feedforward
        shaping = ctx.needs_input_grad[SLOPE]
        feed = feeding(middle, feedforward.pre.weight)
        terms = None
        if any(ctx.needs_input_grad[GAINS:]):
            terms = kernels.Terms(kernels.programs(tokens), feed.programs(hidden), lse.numel(), shaping, rows.device)
        of = dict.fromkeys(kernels.SOURCES) if terms is None else terms.of

        # The feed-forward branch. What goes past it, dx, is where the product that comes out of it is added.
        g = dy.contiguous().flatten(0, -2)
        dx, dbranch = kernels.add_backward(g, middle, lam_feedforward, gamma_feedforward, of["lam_feedforward"])
        aside.product(dbranch, bent, feedforward.post.gradient)
        dhidden = feed.feed_backward(
            g, feedforward.post.weight, hidden, not shaping, slope, gamma_feedforward, of["gamma_feedforward"], of["slope"]
        )
        aside.product(dhidden, middle, feedforward.pre.gradient)
        dx.addmm_(dhidden, feedforward.pre.weight)

        g = dx
        dx, _ = kernels.add_backward(g, tokens, lam_attention, None, of["lam_attention"])
        aside.product(g, mixed, attention.output.gradient)
        dmixed = torch.mm(g, attention.output.weight)
        if at is not None:
            dx, dmixed = (torch.zeros_like(rows).index_add_(0, at, part) for part in (dx, dmixed))
        dbeside = short_kernels.backward(
            dmixed, beside, lse, gamma1, gamma2, attention.heads, attention.scale,
            of["gamma1"], of["gamma2"], gamma_attention, of["gamma_attention"],
        ).flatten(0, -2)  # fmt: skip
        aside.product(dbeside, rows, attention.together.gradient)
        dx.addmm_(dbeside, attention.together.weight)
        if terms is not None:
            aside.do(terms.add, terms.terms, terms.out)
        aside.end_of_block(ctx.written.last)
        sums = of if terms is None else terms.sums
        return dx.unflatten(0, beside.shape[:-1]), None, None, *(sums[name] for name in NAMES)
