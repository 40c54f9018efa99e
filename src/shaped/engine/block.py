"""One block of paths: its steps and its recording."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from shaped.covariance import FEW, make_batch_innermost, symmetrise
from shaped.engine.cuda_graph import capture_walk, is_worth_a_graph
from shaped.engine.process import Process
from shaped.engine.walk import Job, Walk

BlockResult = tuple[Tensor, Tensor, int]
"""Recorded covariances, stopping times, number of events."""


_lock = threading.Lock()
_users, _before = 0, 1


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Within it torch computes on one thread: matrices here are small, and sums must not depend on the number of threads.

    torch has a number for each thread of Python, and one that new threads begin with. The last user, of all threads, restores both.
    """
    global _users, _before
    own = torch.get_num_threads()
    with _lock:
        _before = _before if _users else own
        _users += 1
    torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            torch.set_num_threads(own if _users else _before)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Within it torch computes in the precision that was asked for, also where the caller's autocast would round every product."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@without_autocast()
@use_one_thread()
def run_block(job: Job, advance: Callable[[], None] = lambda: None) -> BlockResult:
    """Runs one block. `advance` is called after each step."""
    V0 = make_batch_innermost(job.V0) if job.V0.shape[-1] <= FEW else job.V0.contiguous()
    walk = (capture_walk(job, V0) if is_worth_a_graph(job, V0) else None) or Walk(job, V0)
    recorded = V0.new_empty(len(job.recorded_steps), *V0.shape)
    if job.recorded_steps[0] == 0:
        recorded[0] = V0
    place = {step: i for i, step in enumerate(job.recorded_steps)}
    for step in range(1, job.steps + 1):
        walk.take_step()
        if step in place:
            recorded[place[step]] = symmetrise(walk.shown)
        advance()
    return recorded, walk.stopped.cpu(), walk.events


def block_size(process: Process, m: int, device: torch.device) -> int:
    """Samples in a block: enough to hide Python's overhead, few enough to stay in the cache (CPU) or in memory (GPU)."""
    budget, most = (2**16, 2**12) if device.type == "cpu" else (2**24, 2**16)
    size = max(1, min(most, 2 ** int(math.log2(max(1, budget // process.count_entries(m))))))
    return max(process.together, size)
