"""Claims of the paper, held against measurements.

A judged claim is a row {"id", "claim", "tokens", "value", "interval", "relation", "threshold", "verdict"}, with a "reason" unless it
holds. Thresholds are constants of the pages, fixed before a run. `verdict` is the one rule for all claims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from shaped.compare import Distance
from shaped.files import replace_non_finite
from shaped.intervals import Z
from shaped.intervals import share_interval as share_of

Row = dict[str, Any]
Interval = tuple[float, float]
RESAMPLES = 400

HOLDS, NOT_PROVED, FAILS = VERDICTS = ("holds", "not proved", "fails")
UNDECIDED = "the threshold is inside the interval"
AT_LEAST, AT_MOST = RELATIONS = ("at least", "at most")

TOLERANCE = 0.02
"""How far the law of a network of the captions' width may be from the SDE's: Kolmogorov-Smirnov distance.

"Surprisingly well" (Sec. 1) has no number. Without a tolerance, enough samples tell every finite network from its limit.
"""


def verdict(interval: Sequence[float | None], relation: str, threshold: float) -> str:
    """Holds: the whole interval is on the right side of the threshold. Fails: it is on the wrong side. Not proved: the threshold is inside.

    An end that is None is infinite.
    """
    low, high = interval
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    if relation == AT_MOST:
        low, high, threshold = -high, -low, -threshold
    if low >= threshold:
        return HOLDS
    return FAILS if high < threshold else NOT_PROVED


def count(rows: Iterable[Row]) -> dict[str, int]:
    """How many claims have each verdict."""
    verdicts = [row["verdict"] for row in rows]
    return {outcome: verdicts.count(outcome) for outcome in VERDICTS}


def describe_verdicts(rows: Sequence[Row]) -> str:
    """The counts in words, the same on the terminal, in the report and in the documents."""
    if not rows:
        return "no claims"
    claims = "claim" if len(rows) == 1 else "claims"
    return f"{len(rows)} {claims}: " + ", ".join(f"{outcome} {number}" for outcome, number in count(rows).items())


def group_claims(rows: Iterable[Row]) -> list[dict[int | None, Row]]:
    """The rows of one claim together, each by its number of tokens."""
    groups: dict[tuple[Any, ...], dict[int | None, Row]] = {}
    for row in rows:
        name = str(row["id"]).removesuffix(f".m{row['tokens']}")
        groups.setdefault((name, row["claim"], row["relation"], row["threshold"]), {})[row["tokens"]] = row
    return list(groups.values())


def list_tokens(rows: Iterable[Row]) -> list[int]:
    """The numbers of tokens for which there are claims."""
    return sorted({row["tokens"] for row in rows if row["tokens"] is not None})


def known_reason(row: Row) -> str:
    """What is known of a claim that does not hold, beside its numbers."""
    _, _, why = str(row.get("reason", "")).partition(f"must be {row['relation']} {row['threshold']:.4g}: ")
    return why.removeprefix(UNDECIDED).removeprefix("; ")


def judge(
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
    """Judges one claim by its interval and one threshold, `at_least` or `at_most`.

    `m` is the number of tokens, None for a claim about training runs. `why` is the known reason for a value on the wrong side.
    """
    if at_least is not None:
        relation, threshold, right = AT_LEAST, at_least, value >= at_least
    else:
        assert at_most is not None
        relation, threshold, right = AT_MOST, at_most, value <= at_most
    ends = replace_non_finite([float(end) for end in interval])
    claimed = {
        "id": id if m is None else f"{id}.m{m}",
        "claim": claim,
        "tokens": m,
        "value": float(value),
        "interval": ends,
        "relation": relation,
        "threshold": float(threshold),
        "verdict": verdict(ends, relation, threshold),
    }
    if claimed["verdict"] == HOLDS:
        return claimed
    inside = UNDECIDED if claimed["verdict"] == NOT_PROVED else ""
    reasons = "; ".join(filter(None, [inside, "" if right else why]))
    low, high = interval
    return claimed | {
        "reason": f"measured {value:.4g} [{low:.4g}, {high:.4g}], must be {relation} {threshold:.4g}{reasons and f': {reasons}'}"
    }


def distance_interval(distance: Distance) -> Interval:
    """An interval with at least 95 % coverage for the distance of two laws, from the distance of two samples.

    The two distances differ by at most sup |(F_n - F) - (G_k - G)|, whose distribution the permutations estimate: it is below the band in
    95 % of cases. A bootstrap interval would be biased upwards, as the distance of two samples is.
    """
    return max(0.0, distance.value - distance.band), min(1.0, distance.value + distance.band)


def judge_agreement(id: str, m: int, claim: str, distance: Distance) -> Row:
    """Judges that two laws agree: their distance is at most TOLERANCE."""
    return judge(id, m, claim, distance.value, distance_interval(distance), at_most=TOLERANCE) | {"band": distance.band}


def judge_separation(id: str, m: int, claim: str, distance: Distance, at_least: float = TOLERANCE) -> Row:
    """Judges that two laws differ: their distance is at least `at_least`, by default TOLERANCE."""
    return judge(id, m, claim, distance.value, distance_interval(distance), at_least=at_least) | {"band": distance.band}


def student(degrees: int) -> float:
    """The 97.5 % quantile of Student's t: exact for 1 and 2 degrees of freedom, else Abramowitz and Stegun 26.7.5.

    That series is 0.7 % too small for 3 degrees of freedom, 0.1 % for 5.
    """
    if degrees <= 2:
        return (math.tan(0.475 * math.pi), 0.95 * math.sqrt(2.0 / (1.0 - 0.95**2)))[degrees - 1]
    powers = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    )
    return Z + sum(power / degrees ** (k + 1) for k, power in enumerate(powers))


def share_interval(happened: Bool[np.ndarray, " sample"]) -> tuple[float, Interval]:
    """The share of independent events, with Wilson's 95 % interval, which is not empty even where nothing happened."""
    return float(happened.mean()), share_of(int(happened.sum()), len(happened))


def mean_interval(values: Float[np.ndarray, " sample"]) -> tuple[float, Interval]:
    """The mean of independent values, with its 95 % interval, which is infinite for one value."""
    if len(values) < 2:
        return float(values.mean()), (-math.inf, math.inf)
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values))
    reach = student(len(values) - 1) * error
    return mean, (mean - reach, mean + reach)


def find_rise(before: Float[np.ndarray, " 3"], after: Float[np.ndarray, " 3"]) -> tuple[float, Interval]:
    """From one estimate to the next, each with the ends of its interval. They are independent: half-widths add in quadrature."""
    value = float(after[0] - before[0])
    down = float(np.hypot(after[0] - after[1], before[2] - before[0]))
    up = float(np.hypot(after[2] - after[0], before[0] - before[1]))
    return value, (value - down, value + up)


def bootstrap_interval(values: np.ndarray, statistic: Callable[[np.ndarray], float], seed: int) -> tuple[float, Interval]:
    """A statistic of independent values or rows, [sample, ...], with its 95 % bootstrap interval."""
    rng = np.random.default_rng(seed)
    drawn = [statistic(values[rng.integers(len(values), size=len(values))]) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(statistic(values)), (float(low), float(high))
