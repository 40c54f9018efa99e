"""A side stream for the gradients of weights and gains: nothing needs them before the end of the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """Work beside the main stream of a GPU. On a CPU the work is done at once.

    The caching allocator reuses memory in the order of the main stream alone. So this keeps the tensors that the work reads, until the main
    stream has waited for it.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._captured = False
        self._used: list[Tensor] = []
        self._before: tuple[list[Tensor], Any] | None = None  # tensors of the block before, and the event that ends its work

    def write_weight_gradient(self, dy: Tensor, x: Tensor, gradient: Tensor) -> None:
        """Writes dy' x to `gradient`."""
        self.run(lambda: torch.mm(dy.t(), x, out=gradient), dy, x)

    def run(self, work: Callable[[], object], *used: Tensor) -> None:
        """Runs `work` after all that the main stream has been given so far.

        Nobody may write to the tensors `used` before the next block's backward pass has ended, nor read the results before `join`.
        """
        if not used[0].is_cuda:
            work()
            return
        captured = torch.cuda.is_current_stream_capturing()
        if self._stream is None or captured != self._captured:  # in a CUDA graph, the cuBLAS workspace of a stream is the graph's memory
            self._stream, self._captured = torch.cuda.Stream(used[0].device), captured
        self._used += used
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()

    def end_block(self, last: bool) -> None:
        """Ends a block's backward pass and frees the tensors of the block before it. After the `last` one the streams are joined."""
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
        """Makes the main stream wait for all work."""
        pending = self._used or self._before is not None
        self._used, self._before = [], None  # first: after a failed capture, waiting fails too
        if self._stream is not None and pending:
            torch.cuda.current_stream().wait_stream(self._stream)

    @contextmanager
    def joined_on_error(self) -> Iterator[None]:
        """Joins the streams if a backward pass fails: a CUDA graph's capture must end with one stream."""
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the first error is the one to report
                self.join()
            raise
