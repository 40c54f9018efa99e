"""Ensembles: random networks, and paths of their SDE, at one setting; their simulation as jobs for any process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shaped.covariance import equicorrelated
from shaped.engine import Record
from shaped.figures.harness.simulator import Simulator
from shaped.finite import propagate
from shaped.layers import Layer, PostLN, PreLN, ReLUFeedForward, ShapedAttention, ShapedFeedForward
from shaped.layers.attention import Mask
from shaped.limit import solve
from shaped.trajectory import Trajectory

EXPLODED = 1e4  # a path with an eigenvalue that large is exploding (Fig. stability); it would drown every mean


def make_models(gamma: float, mask: Mask = None) -> dict[str, Layer]:
    """The Transformers that the paper compares (Fig. rho_path_density, Fig. gradients)."""

    def vanilla(gamma: float, lam: float | None = None) -> tuple[ShapedAttention, ReLUFeedForward]:
        return ShapedAttention(gamma, mask=mask, lam=lam).unshaped, ReLUFeedForward(gamma, lam=lam)

    unshaped, (attention, feedforward) = vanilla(gamma), vanilla(1.0, lam=1.0)
    return {
        "shaped": ShapedAttention(gamma, mask=mask) >> ShapedFeedForward(gamma),
        "unshaped": unshaped[0] >> unshaped[1],
        "preln": PreLN(attention) >> PreLN(feedforward),
        "postln": PostLN(attention) >> PostLN(feedforward),
    }


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Networks of width n and depth d, or paths of the SDE to the same time d/n, all from one covariance V0."""

    layer: Layer
    m: int
    n: int
    d: int
    samples: int
    seed: int
    rho: float = 0.2
    variance: float = 1.0
    alternating: bool = False  # every second token of V0 changes its sign
    step: float = 0.01  # of the SDE
    record: Record = "last"
    upper: float | None = EXPLODED
    lower: float | None = None
    single: bool = False  # networks in single precision: half the time, and its rounding is far below their distance from the SDE
    device: str = "cpu"

    @property
    def V0(self) -> Tensor:
        V0 = equicorrelated(self.m, self.rho, self.variance)
        sign = (-1.0) ** torch.arange(self.m) if self.alternating else torch.ones(self.m)
        return sign[:, None] * V0 * sign

    @property
    def options(self) -> dict[str, Any]:
        """The options that `propagate` and `solve` share."""
        bounds = {"upper": self.upper, "lower": self.lower}
        return bounds | {"samples": self.samples, "seed": self.seed, "record": self.record, "device": self.device, "progress": False}

    def simulate_network(self) -> Trajectory:
        dtype = torch.float32 if self.single else torch.float64
        return propagate(self.layer, self.V0, n=self.n, d=self.d, dtype=dtype, **self.options)

    def simulate_limit(self, V0: Tensor | None = None) -> Trajectory:
        """From V0, or from matrices that other paths have reached."""
        T = self.d / self.n
        return solve(self.layer, self.V0 if V0 is None else V0, T=T, steps=max(1, round(T / self.step)), **self.options)

    def simulate(self, face: str) -> Trajectory:
        return self.simulate_limit() if face == "sde" else self.simulate_network()


class Sized(Protocol):
    """Settings of a page that suffice for an ensemble."""

    @property
    def n(self) -> int: ...
    @property
    def d(self) -> int: ...
    @property
    def rho(self) -> float: ...
    @property
    def samples(self) -> int: ...


def make_ensemble(settings: Sized, layer: Layer, m: int, simulator: Simulator, **more: Any) -> Ensemble:
    """An ensemble of m tokens at a page's settings; with fewer samples where m is not drawn. `more` overrides fields."""
    sizes = {"n": settings.n, "d": settings.d, "rho": settings.rho, "samples": simulator.sample_count(settings.samples, m)}
    return Ensemble(layer=layer, m=m, seed=simulator.seed, device=simulator.device, **(sizes | more))


FACES = ("network", "sde")
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def simulate_arrays(ensemble: Ensemble, face: str) -> Arrays:
    """Simulates; returns recorded times, covariances and stopping times, as arrays that survive pickling."""
    paths = ensemble.simulate(face)
    return paths.t.numpy(), paths.V.cpu().numpy(), paths.stopped.numpy()


def to_trajectory(arrays: Arrays) -> Trajectory:
    t, V, stopped = map(torch.from_numpy, arrays)
    return Trajectory(t, V, stopped)


def simulate_mean_pairs(ensemble: Ensemble, names: Sequence[str], absolute: bool) -> dict[str, np.ndarray]:
    """Simulates networks; returns "rho" or "V" of each at each recorded layer, averaged over the pairs of its tokens."""
    paths = ensemble.simulate_network()
    rows, columns = torch.triu_indices(ensemble.m, ensemble.m, 1)
    means = {}
    for name in names:
        entries = getattr(paths, name)[..., rows, columns]
        means[name] = (entries.abs() if absolute else entries).mean(-1).cpu().numpy()
    return means | {"layer": np.rint(paths.t.numpy() * ensemble.n)}


def make_jobs(ensemble: Ensemble) -> dict[str, partial[Arrays]]:
    """One job for the network and one for the SDE."""
    return {face: partial(simulate_arrays, ensemble, face) for face in FACES}
