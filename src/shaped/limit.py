"""solve: the covariance SDE of a layer, by steps that cannot leave the positive cone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from shaped import engine
from shaped.checks import positive, whole_number
from shaped.covariance import Point
from shaped.layers.base import Layer, check_layer
from shaped.layers.terms import Term
from shaped.randomness import Stream
from shaped.trajectory import Trajectory

Paths = Bool[Tensor, " batch"]


@dataclass(frozen=True, eq=False)
class ConeSteps(engine.PointProcess):
    """Each term moves in turn (Lie splitting, weak order 1); no move can leave the positive cone."""

    kind: ClassVar[str] = "cone"
    terms: tuple[Term, ...]
    h: float

    def step(self, state: Point, stream: Stream) -> tuple[Point, None]:
        for term in self.terms:
            state = term.move(state, self.h, stream)
        return Point(matrix=state.V), None


@dataclass(frozen=True, eq=False)
class EulerSteps(engine.PointProcess):
    """Euler-Maruyama, V + h b(V) + sqrt(h) Sigma(V)^{1/2} xi, projected onto the cone where it left it. For comparison."""

    kind: ClassVar[str] = "euler"
    terms: tuple[Term, ...]
    h: float

    def step(self, state: Point, stream: Stream) -> tuple[Point, Paths]:
        drift = reduce(add, (term.drift(state.V) for term in self.terms))
        noise = reduce(add, (term.noise(state, stream) for term in self.terms))
        V = state.V + self.h * drift + math.sqrt(self.h) * noise
        finite = V.isfinite().all(-1).all(-1)[:, None, None]
        values, vectors = torch.linalg.eigh(torch.where(finite, V, 0.0))
        outside = values[:, 0] < 0.0
        if outside.any():
            root = vectors * values.clamp(min=0.0).sqrt()[:, None, :]
            V = torch.where(outside[:, None, None], root @ root.mT, V)
        return Point(matrix=torch.where(finite, V, math.nan)), outside


MOST_STEPS = 10**9
METHODS: dict[str, Callable[[tuple[Term, ...], float], engine.PointProcess]] = {"cone": ConeSteps, "euler": EulerSteps}


def solve(
    layer: Layer,
    V0: Any,
    *,
    T: float,
    steps: int | None = None,
    samples: int | None = None,
    seed: int,
    method: str = "cone",
    record: engine.Record = "all",
    upper: float | None = None,
    lower: float | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float64,
    chunk: int | None = None,
    executor: engine.Executor | None = None,
    progress: bool | None = None,
) -> Trajectory:
    r"""Samples paths of $dV = b(V)\,dt + \Sigma(V)^{1/2}\,dB$ from V0 to time T = depth/width.

    Args:
        layer: a layer or chain with a limit.
        V0: [m, m], or [samples, m, m] for a start of its own for each path.
        T: the horizon, depth/width.
        steps: number of time steps; by default as many as make a step at most 0.01.
        samples: number of paths; by default the number of matrices in V0.
        seed: the same seed gives the same numbers, whatever the chunk size or the number of workers.
        method: "cone" (default; stays positive semi-definite at any step size) or "euler" (with projection; `info["projections"]`
            counts how many steps needed it).
        record: "all" steps, the "last", or every k-th and the last. With "last" memory does not grow with the number of steps.
        upper, lower: a path stops when its largest eigenvalue passes `upper` or its smallest falls below `lower`. By default only a
            path that leaves the safe part of the float range stops.
        device, dtype: where and in which precision to compute.
        chunk: number of samples that a worker takes at a time, rounded to whole blocks; without an executor it has no meaning.
        executor: anything like a concurrent.futures.Executor; samples are then simulated there (see `shaped.workers`).
        progress: show a bar on standard error: None for work of over a second, True, False. Never where that is not a terminal.
    """
    check_layer(layer)
    T = positive("T", T)
    steps = whole_number("steps", max(1, math.ceil(100 * T)) if steps is None else steps, most=MOST_STEPS)
    if not (isinstance(method, str) and method in METHODS):
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    h = T / steps
    return engine.run(
        METHODS[method](layer.terms, h),
        V0,
        steps=steps,
        dt=h,
        samples=samples,
        seed=seed,
        record=record,
        upper=upper,
        lower=lower,
        device=device,
        dtype=dtype,
        chunk=chunk,
        executor=executor,
        progress=progress,
        info={"method": method, "steps": steps},
        event="projections" if method == "euler" else None,
    )
