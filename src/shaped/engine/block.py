"""One block of paths: its steps, its recording, and where its paths stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from shaped.covariance import FEW, make_batch_innermost, symmetrise
from shaped.engine.process import Process
from shaped.randomness import Stream

BlockResult = tuple[Tensor, Tensor, int]
"""Recorded covariances, stopping times, number of events."""


@dataclass(frozen=True)
class Bounds:
    """A path stops at an eigenvalue above `upper` or below `lower`. None: only outside the safe part of the float range."""

    upper: float | None
    lower: float | None

    def crossed(self, V: Float[Tensor, "batch m m"]) -> Bool[Tensor, " batch"]:
        crossed = ~is_safe(V)
        eye = torch.eye(V.shape[-1], dtype=V.dtype, device=V.device)
        # A matrix is positive definite exactly when its Cholesky factor exists: cheaper than its eigenvalues.
        if self.upper is not None:
            upper = min(self.upper, torch.finfo(V.dtype).max)
            crossed |= torch.linalg.cholesky_ex(upper * eye - V).info > 0
        if self.lower:  # nothing is below 0
            crossed |= torch.linalg.cholesky_ex(V - self.lower * eye).info > 0
        return crossed


def is_safe(V: Float[Tensor, "batch m m"]) -> Bool[Tensor, " batch"]:
    """Is V of a size whose cube, which the drift takes, neither overflows nor loses digits? False where V is not finite.

    The diagonal is enough: no entry of a positive semi-definite matrix is larger than its largest diagonal entry.
    """
    size = V.diagonal(dim1=-2, dim2=-1).amax(-1)
    limits = torch.finfo(V.dtype)
    return (size > limits.tiny**0.25) & (size < limits.max**0.25)


@dataclass(frozen=True, eq=False)
class Job:
    """Everything that determines the paths of one block."""

    process: Process
    V0: Float[Tensor, "batch m m"]
    steps: int
    recorded_steps: tuple[int, ...]
    dt: float
    bounds: Bounds
    seed: int
    block: int


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Within it torch computes on one thread: matrices here are small, and sums must not depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@use_one_thread()
def run_block(job: Job, advance: Callable[[], None] = lambda: None) -> BlockResult:
    """Runs one block. `advance` is called after each step."""
    V0 = make_batch_innermost(job.V0) if job.V0.shape[-1] <= FEW else job.V0.contiguous()
    stream = Stream(job.seed, job.block, kind=job.process.kind, dtype=V0.dtype, device=V0.device)
    process, samples = job.process, len(V0)
    parked = state = process.start(V0, stream)
    shown, alive, events = V0, ~job.bounds.crossed(V0), 0
    stopped = torch.where(alive, math.inf, 0.0).to(torch.float64)
    recorded = V0.new_empty(len(job.recorded_steps), *V0.shape)
    if job.recorded_steps[0] == 0:
        recorded[0] = V0
    place = {step: i for i, step in enumerate(job.recorded_steps)}
    running = int(alive.sum())
    for step in range(1, job.steps + 1):
        if running:
            state, happened = process.step(state, stream)
            V = process.covariance(state)
            crossed = job.bounds.crossed(V)
            if happened is not None:
                events += int((happened & alive).sum())
            if running < samples or crossed.any():
                # A stopped path shows the state in which it stopped (its last safe state, if it left the float range). Its simulation
                # continues from its start, and nobody reads it.
                shown = torch.where((alive & is_safe(V))[:, None, None], V, shown)
                stopped = torch.where(alive & crossed, step * job.dt, stopped)
                alive = alive & ~crossed
                running = int(alive.sum())
                state = process.select(alive, state, parked)
            else:
                shown = V
        if step in place:
            recorded[place[step]] = symmetrise(shown)
        advance()
    return recorded, stopped.cpu(), events


def block_size(process: Process, m: int, device: torch.device) -> int:
    """Samples in a block: enough to hide Python's overhead, few enough to stay in the cache (CPU) or in memory (GPU)."""
    budget, most = (2**16, 2**12) if device.type == "cpu" else (2**24, 2**16)
    size = max(1, min(most, 2 ** int(math.log2(max(1, budget // process.count_entries(m))))))
    return max(process.together, size)
