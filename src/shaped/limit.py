"""solve: the covariance SDE of a layer, with steps that stay positive semi-definite."""

from __future__ import annotations

import math
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from shaped import engine
from shaped.checks import fold_seed, positive, quote, whole_number
from shaped.covariance import Point, match_layout
from shaped.layers.base import Layer, check_layer
from shaped.layers.terms import Term, WeightNoise
from shaped.randomness import Normals, Recorded, Summed
from shaped.stepping import PAIRS, StepEffect, warn_of_step
from shaped.trajectory import Trajectory

Paths = Bool[Tensor, " batch"]


@dataclass(frozen=True, eq=False)
class ConeSteps(engine.PointProcess):
    """Lie splitting, weak order 1: the terms move one after another. Every move stays positive semi-definite."""

    kind: ClassVar[str] = "cone"
    terms: tuple[Term, ...]
    h: float

    def step(self, state: Point, stream: Normals) -> tuple[Point, None]:
        for term in self.terms:
            state = term.move(state, self.h, stream)
        return Point(matrix=state.V), None


@dataclass(frozen=True, eq=False)
class EulerSteps(engine.PointProcess):
    """Euler-Maruyama, V + h b(V) + sqrt(h) Sigma(V)^{1/2} xi, projected back onto the cone if it left it. For comparison."""

    kind: ClassVar[str] = "euler"
    terms: tuple[Term, ...]
    h: float

    def step(self, state: Point, stream: Normals) -> tuple[Point, Paths]:
        drift = reduce(add, (term.drift(state.V) for term in self.terms))
        noise = reduce(add, (term.noise(state, stream) for term in self.terms))
        V = state.V + self.h * drift + math.sqrt(self.h) * noise
        values, vectors, found = eigenvalues(V)
        outside = found & (values[:, 0] < 0.0)
        if outside.any():
            root = vectors * values.clamp(min=0.0).sqrt()[:, None, :]
            V = torch.where(outside[:, None, None], root @ root.mT, V)
        return Point(matrix=torch.where(found[:, None, None], V, math.nan)), outside


def eigenvalues(V: Float[Tensor, "batch m m"]) -> tuple[Float[Tensor, "batch m"], Float[Tensor, "batch m m"], Paths]:
    """Eigenvalues, eigenvectors, and a flag for each path that is False if V is not finite or LAPACK fails on it."""
    finite = V.isfinite().all(-1).all(-1)
    V = torch.where(finite[:, None, None], V, 0.0)
    try:
        return *torch.linalg.eigh(V), finite
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage] (documented, but not in its list of exports)
        if len(V) == 1:
            return V[:, 0], V, torch.zeros_like(finite)
        one, other = (eigenvalues(half) for half in V.tensor_split(2))
        values, vectors, found = (torch.cat(parts) for parts in zip(one, other, strict=True))
        return values, vectors, found & finite


@dataclass(frozen=True, eq=False)
class HalvedSteps(engine.PointProcess):
    """Pairs of paths that share their noise where possible. One path takes a step, the other takes two half steps."""

    kind: ClassVar[str] = "halved"
    together: ClassVar[int] = 2
    whole: ConeSteps | EulerSteps
    half: ConeSteps | EulerSteps
    bounds: engine.Bounds

    def step(self, state: Point, stream: Normals) -> tuple[Point, None]:
        one, other = Recorded(stream), Recorded(stream)
        middle, _ = self.half.step(Point(matrix=match_layout(state.V[1::2], state.V)), one)
        fine, _ = self.half.step(middle, other)
        coarse, _ = self.whole.step(Point(matrix=match_layout(state.V[::2], state.V)), Summed(stream, one, other))
        V = torch.empty_like(state.V)
        V[::2] = coarse.V
        V[1::2] = torch.where(
            self.bounds.crossed(middle.V)[:, None, None], middle.V, fine.V
        )  # a path that crosses a bound at half time stops there
        return Point(matrix=V), None


MOST_STEPS = 10**9
MOST_PARTS = 1000  # of one step of the weights' noise
COARSEST = 0.01  # the longest default step
METHODS: dict[str, type[ConeSteps | EulerSteps]] = {"cone": ConeSteps, "euler": EulerSteps}


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
    executor: Executor | None = None,
    progress: engine.Progress = None,
    check: bool | None = None,
) -> Trajectory:
    r"""Samples paths of $dV = b(V)\,dt + \Sigma(V)^{1/2}\,dB$ from V0 to time T = depth/width.

    Args:
        layer: a layer or chain with a limit.
        V0: [m, m], or [samples, m, m] for a start of its own for each path.
        T: the horizon, depth/width.
        steps: number of time steps; by default as many as make a step at most 0.01, and short enough for the layer's weights and
            activations with so many tokens. A path on which attention is fast, because its tokens are long, takes a step in parts.
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
        progress: show a bar on standard error: None for work of over a second, True, False. Never where that is not a terminal. Or a
            function to call with the number of steps done since its last call; what it raises ends the simulation.
        check: estimate what the step does to the law at the horizon, by halving it on one of 32 samples: `info["step_effect"]`. A
            `StepWarning` says so where that is, by three standard errors of the estimate, more than the sampling error. By default where
            `steps` is left out and there are at least 512 samples. `progress` counts its steps too, as many again.
    """
    options = engine.RunOptions(
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
    )
    check_layer(layer)
    T = positive("T", T)
    m = engine.count_tokens(V0)
    by_default = steps is None
    steps = default_steps(layer, m, T) if steps is None else whole_number("steps", steps, most=MOST_STEPS)
    least = max((math.ceil(T / MOST_PARTS / term.longest(m)) for term in layer.terms if isinstance(term, WeightNoise)), default=1)
    if steps < least:
        raise ValueError(f"steps must be at least {least} for T = {T:g} and {layer!r}, got {steps}")
    if not (isinstance(method, str) and method in METHODS):
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {quote(method)}")
    if check is not None and not isinstance(check, bool):
        raise ValueError(f"check must be True, False or None, got {quote(check)}")
    h, make_steps = T / steps, METHODS[method]
    event = "projections" if method == "euler" else None
    terms = tuple(term.stopping_at(math.inf if options.upper is None else options.upper) for term in layer.terms)
    whole = make_steps(terms, h)
    paths = engine.run(whole, V0, options, steps=steps, dt=h, info={"method": method, "steps": steps}, event=event)
    count = paths.V.shape[1] // 32
    if check or (check is None and by_default and count >= PAIRS):
        count = max(count, min(PAIRS, paths.V.shape[1]))
        starts = engine.prepare_start(V0, options.samples, dtype)
        # At random: of matrices in a regular order, every 32nd may be of one kind.
        chosen = torch.randperm(len(starts), generator=torch.Generator().manual_seed(fold_seed(options.seed)), device="cpu")[:count]
        starts = starts[chosen.to(starts.device)].repeat_interleave(2, 0)
        half = make_steps(tuple(term.halved() for term in terms), h / 2)
        halved = HalvedSteps(whole, half, engine.Bounds(options.upper, options.lower))
        pairs = engine.run(halved, starts, replace(options, samples=None, record="last"), steps=steps, dt=h, info={})
        effect = StepEffect.of(pairs)
        warn_of_step(effect, paths, steps)
        paths.info["step_effect"] = effect
    return paths


def default_steps(layer: Layer, m: int, T: float) -> int:
    """The number of steps of at most 0.01. Steps are shorter, down to 0.01/16, if a term of the layer needs that with m tokens."""
    needed: dict[type[Term], float] = {}  # of terms of one kind together: heads with biases of their own are a term each
    for term in layer.terms:
        needed[type(term)] = needed.get(type(term), 0.0) + 1.0 / term.longest(m)
    longest = 1.0 / min(16.0 / COARSEST, max(1.0 / COARSEST, *needed.values()))
    if T / longest > MOST_STEPS:
        raise ValueError(f"T must be at most {MOST_STEPS * longest:g}, {MOST_STEPS} steps, got {T:g}")
    return max(1, math.ceil(T / longest - 1e-9))
