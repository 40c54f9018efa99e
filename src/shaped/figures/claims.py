"""Claims: what the paper says, what was measured, and whether it holds.

A claim is a row {"id", "claim", "tokens", "value", "interval", "relation", "threshold", "holds"}, with a "reason" where it fails.
Thresholds are constants of the figures, fixed before a run. A claim holds only if the whole 95 % interval lies on the right side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from shaped.compare import Distance

Row = dict[str, Any]
Interval = tuple[float, float]
RESAMPLES = 400

TOLERANCE = 0.02
"""How far a network of the captions' width may be from the SDE: Kolmogorov-Smirnov distance beyond what two samples of one law show.

"Surprisingly well" (Sec. 1) has no number. Without a tolerance, enough samples tell every finite network from its limit.
"""
FAMILY = 1.949 / 1.358
"""Kolmogorov's 99.9 % quantile over his 95 %: a run makes about 50 comparisons, which together may raise a false alarm in 5 % of runs."""


def row(
    id: str,
    m: int | None,
    claim: str,
    value: float,
    interval: Interval,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    why: str = "",
) -> Row:
    """One claim, of m tokens if it is about so many, with one threshold; `why` says, where it is known, why it fails if it does."""
    low, high = interval
    if at_least is not None:
        relation, threshold, holds = "at least", at_least, low >= at_least
    else:
        assert at_most is not None
        relation, threshold, holds = "at most", at_most, high <= at_most
    made = {
        "id": id if m is None else f"{id}.m{m}",
        "claim": claim,
        "tokens": m,
        "value": float(value),
        "interval": [float(end) if math.isfinite(end) else None for end in (low, high)],
        "relation": relation,
        "threshold": float(threshold),
        "holds": bool(holds),
    }
    if holds:
        return made
    if value >= threshold if at_least is not None else value <= threshold:
        why = "the value is on the right side, but these samples do not prove it"
    return made | {"reason": f"measured {value:.4g} [{low:.4g}, {high:.4g}], must be {relation} {threshold:.4g}{why and f': {why}'}"}


def agreement(id: str, m: int, claim: str, distance: Distance) -> Row:
    """Two laws agree: their distance is at most what samples of one law stay below, in all comparisons of 95 % of runs, and a tolerance."""
    threshold = FAMILY * distance.band + TOLERANCE
    # The distance of two samples is above that of their laws by up to the band, and hardly ever below it by more: the bootstrap, which
    # draws from the samples, is biased the same way and would miss a true distance of 0 most of the time.
    low, high = max(0.0, distance.value - distance.band), distance.value + distance.band
    # The band allows for the sampling noise already: it is the distance itself that is held against it.
    made = row(id, m, claim, distance.value, (distance.value, distance.value), at_most=threshold)
    made["interval"] = [low, high]
    if "reason" in made:
        made["reason"] = f"the distance {distance.value:.4g} is above the band of one law, {FAMILY * distance.band:.4g}, plus {TOLERANCE:g}"
    return made | {"band": distance.band, "within_band": distance.within_band}


def separation(id: str, m: int, claim: str, distance: Distance, at_least: float) -> Row:
    """Two laws are apart: their distance, with its 95 % interval by the bootstrap, is at least so much."""
    reach = 1.96 * distance.error
    return row(id, m, claim, distance.value, (distance.value - reach, distance.value + reach), at_least=at_least)


def student(degrees: int) -> float:
    """The 97.5 % quantile of Student's t (Abramowitz and Stegun 26.7.5; 0.7 % too small for 3 degrees of freedom, 0.1 % for 5; exact for 1
    and 2, where it would be a quarter and 3 % too small)."""
    if degrees <= 2:
        return (math.tan(0.475 * math.pi), 0.95 * math.sqrt(2.0 / (1.0 - 0.95**2)))[degrees - 1]
    z = 1.959964
    powers = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(power / degrees ** (k + 1) for k, power in enumerate(powers))


def share_interval(happened: Bool[np.ndarray, " sample"]) -> tuple[float, Interval]:
    """The share of independent events, with Wilson's 95 % interval, which has a width also where nothing happened."""
    z, n, share = 1.959964, len(happened), float(happened.mean())
    centre, spread = share + z**2 / (2 * n), z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return share, (max(0.0, centre - spread) / (1 + z**2 / n) if share else 0.0, min(1.0, (centre + spread) / (1 + z**2 / n)))


def mean_interval(values: Float[np.ndarray, " sample"]) -> tuple[float, Interval]:
    """The mean of independent values, with its 95 % interval; without an end where there is one value."""
    if len(values) < 2:
        return float(values.mean()), (-math.inf, math.inf)
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values))
    reach = student(len(values) - 1) * error
    return mean, (mean - reach, mean + reach)


def bootstrap_interval(values: np.ndarray, statistic: Callable[[np.ndarray], float], seed: int) -> tuple[float, Interval]:
    """A statistic of independent values or rows, [sample, ...], with its 95 % bootstrap interval."""
    rng = np.random.default_rng(seed)
    drawn = [statistic(values[rng.integers(len(values), size=len(values))]) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(statistic(values)), (float(low), float(high))
