"""The paths of one block, from step to step, and where they stop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from shaped.covariance import exceeds, largest_safe
from shaped.engine.process import Process
from shaped.randomness import Stream


@dataclass(frozen=True)
class Bounds:
    """A path stops at an eigenvalue above `upper` or below `lower`. None: only outside the safe part of the float range."""

    upper: float | None
    lower: float | None

    def crossed(self, V: Float[Tensor, "batch m m"]) -> Bool[Tensor, " batch"]:
        crossed = ~is_safe(V)
        if self.upper is not None:
            crossed |= exceeds(V, self.upper)
        if self.lower:  # nothing is below 0
            eye = torch.eye(V.shape[-1], dtype=V.dtype, device=V.device)
            crossed |= torch.linalg.cholesky_ex(V - self.lower * eye).info > 0
        return crossed


def is_safe(V: Float[Tensor, "batch m m"]) -> Bool[Tensor, " batch"]:
    """Is V of a size whose cube, which the drift takes, neither overflows nor loses digits? False where V is not finite.

    The diagonal is enough: no entry of a positive semi-definite matrix is larger than its largest diagonal entry.
    """
    size = V.diagonal(dim1=-2, dim2=-1).amax(-1)
    limits = torch.finfo(V.dtype)
    return (size > limits.tiny**0.25) & (size < largest_safe(V.dtype))


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


class Walk:
    """The paths of one block between two steps.

    A stopped path shows the state in which it stopped (its last safe state, if it left the float range). Its simulation continues from its
    start, and nobody reads it.
    """

    def __init__(self, job: Job, V0: Float[Tensor, "batch m m"]):
        self.job, self.process = job, job.process
        self.state: Any
        self.stream = Stream(job.seed, job.block, kind=job.process.kind, dtype=V0.dtype, device=V0.device)
        self.parked = self.state = job.process.start(V0, self.stream)
        self.shown, self.alive = V0, ~job.bounds.crossed(V0)
        self.stopped = torch.where(self.alive, math.inf, 0.0).to(torch.float64)
        self.running, self.step, self.events = int(self.alive.sum()), 0, 0

    def take_step(self) -> None:
        self.step += 1
        if not self.running:
            return
        self.state, happened = self.process.step(self.state, self.stream)
        V = self.process.covariance(self.state)
        crossed = self.job.bounds.crossed(V)
        if happened is not None:
            self.events += int((happened & self.alive).sum())
        if self.running < len(V) or crossed.any():
            self.stop(V, crossed, self.step * self.job.dt)
            self.running = int(self.alive.sum())
        else:
            self.shown = V

    def stop(self, V: Float[Tensor, "batch m m"], crossed: Bool[Tensor, " batch"], time: float | Float[Tensor, ""]) -> None:
        """Shows V on the paths that run; those that crossed a bound stop at this time."""
        self.shown = torch.where((self.alive & is_safe(V))[:, None, None], V, self.shown)
        self.stopped = torch.where(self.alive & crossed, time, self.stopped)
        self.alive = self.alive & ~crossed
        self.state = self.process.select(self.alive, self.state, self.parked)
