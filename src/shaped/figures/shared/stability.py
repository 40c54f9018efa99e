"""Stopping times of shaped attention from an adversarially large start: shared by fig5 and fig8."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from shaped.figures.harness.claims import bootstrap_interval, find_rise
from shaped.figures.shared.ensembles import Ensemble
from shaped.layers import ShapedAttention

CAP = 1.0
EARLY, USUAL_STEP = 10, 0.01
EDGE = "near the edge of stability (τ0 = 8 to 16 with four tokens) the median rises again beyond γ = 0.7 to 0.8"
NEXT = "between neighbours on the grid"
TWO_TOKENS = (
    "with two tokens the largest eigenvalue grows by at most 6 % a layer, near γ = 0.5 to 0.7, and more slowly beyond "
    "(with four by 15 to 20 %): the median is smallest near γ = 0.5 and rises again"
)
SLACK = 0.05  # medians of 100 samples: neighbours on a grid may be out of order by this much and still count as ordered


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Fig. stability: tokens of length 10·sqrt(n), so that V0 has eigenvalues of order 100; a path stops where one leaves the bounds."""

    n: int = 200
    d: int = 200
    variance: float = 100.0
    rho: float = 0.2
    upper: float = 1e4
    lower: float = 1e-4
    samples: int = 100


def make_ensemble(settings: Settings, gamma: float, tau0: float, m: int, seed: int, device: str, step: float = 0.01) -> Ensemble:
    return Ensemble(
        layer=ShapedAttention(gamma, tau0),
        m=m,
        n=settings.n,
        d=settings.d,
        samples=settings.samples,
        seed=seed,
        rho=settings.rho,
        variance=settings.variance,
        step=step,
        upper=settings.upper,
        lower=settings.lower,
        device=device,
    )


def simulate_stopping_times(ensemble: Ensemble, face: str) -> Float[np.ndarray, " sample"]:
    """Simulates; returns t* = d*/n of each path, capped at 1 as in the paper."""
    return np.minimum(simulate_early_first(ensemble) if face == "sde" else ensemble.simulate_network().stopped.numpy(), CAP)


def simulate_early_first(ensemble: Ensemble) -> Float[np.ndarray, " sample"]:
    """Stopping times of the SDE. Most paths stop at once; those that are left after EARLY layers go on with the usual step."""
    if ensemble.step >= USUAL_STEP or ensemble.d <= EARLY:
        return ensemble.simulate_limit().stopped.numpy()
    first = replace(ensemble, d=EARLY).simulate_limit()
    stopped = first.stopped.numpy()
    left = np.isinf(stopped)
    if left.any():
        rest = replace(ensemble, d=ensemble.d - EARLY, step=USUAL_STEP, samples=int(left.sum()), seed=ensemble.seed + 1)
        stopped[left] = EARLY / ensemble.n + rest.simulate_limit(first.V[-1, left]).stopped.numpy()
    return stopped


def estimate_median(times: Float[np.ndarray, " sample"], seed: int) -> tuple[float, float, float]:
    value, (low, high) = bootstrap_interval(times, lambda drawn: float(np.median(drawn)), seed)
    return value, low, high


def find_largest_rise(medians: Float[np.ndarray, "step 3"]) -> tuple[float, tuple[float, float]]:
    """Of medians with their intervals: the rise between neighbours whose interval reaches highest; 0 if all fall."""
    rises = [find_rise(before, after) for before, after in pairwise(medians)]
    value, (low, high) = max(rises, key=lambda entry: entry[1][1])
    return max(0.0, value), (max(0.0, low), max(0.0, high))


def difference(more: Float[np.ndarray, " 3"], less: Float[np.ndarray, " 3"]) -> tuple[float, tuple[float, float]]:
    """Of two medians with their intervals. Adding the intervals' ends makes its own interval too wide, which is conservative."""
    return more[0] - less[0], (more[1] - less[2], more[2] - less[1])
