"""Trajectory: what `solve` and `propagate` return, and what figures and diagnostics read."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxtyping import Float
from torch import Tensor

from shaped.covariance import correlation
from shaped.intervals import share_interval


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Sampled paths of the covariance.

    A stopped path keeps its last state, so every number here is finite.
    """

    t: Float[Tensor, " time"]
    V: Float[Tensor, "time sample m m"]
    stopped: Float[Tensor, " sample"]
    """Time at which each path stopped; inf where it never did."""
    info: dict[str, Any] = field(default_factory=dict)
    """Facts of the simulation: method, seed, counts of events, and the effect of the solver's step (`StepEffect`)."""

    @cached_property
    def rho(self) -> Float[Tensor, "time sample m m"]:
        """Correlations of the tokens (`correlation` of V)."""
        return correlation(self.V)

    @property
    def stopped_share(self) -> float:
        """The share of paths that stopped."""
        return self.stopped.isfinite().double().mean().item()

    @property
    def stopped_interval(self) -> tuple[float, float]:
        """The 95 % interval of the share of paths that stop."""
        return share_interval(int(self.stopped.isfinite().sum()), len(self.stopped))

    def __repr__(self) -> str:
        times, samples, m, _ = self.V.shape
        stopped = int(self.stopped.isfinite().sum())
        facts = ", ".join(f"{key}={value!r}" for key, value in self.info.items() if isinstance(value, str | int | float))
        return f"Trajectory({times} times to t={self.t[-1]:.4g}, {samples} samples, {m} tokens, {stopped} stopped, {facts})"
