"""The area under the ROC curve, and its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shaped.intervals import Z


def measure_auc(scores: Sequence[float], happened: Sequence[bool]) -> float:
    """P(score of one where it happened > score of one where it did not) + half of the probability of a tie (Mann and Whitney).

    nan where it happened to all or to none.
    """
    with_it = [score for score, event in zip(scores, happened, strict=True) if event]
    without = [score for score, event in zip(scores, happened, strict=True) if not event]
    if not with_it or not without:
        return math.nan
    wins = sum((high > low) + 0.5 * (high == low) for high in with_it for low in without)
    return wins / (len(with_it) * len(without))


def auc_interval(auc: float, with_it: int, without: int) -> tuple[float, float]:
    """Newcombe's 95 % interval (Statistics in Medicine 25, 2006, method 5): all areas whose own standard error allows this one.

    Like Wilson's interval of a share, it has a positive width even where the two groups are separated perfectly; DeLong's and the
    bootstrap's have none there. nan where there is no area.
    """
    if math.isnan(auc):
        return math.nan, math.nan
    return _find_low(auc, with_it, without), 1.0 - _find_low(1.0 - auc, with_it, without)


def _find_low(auc: float, with_it: int, without: int) -> float:
    """The area below `auc` that is Z of its standard errors away, by bisection."""
    low, high = 0.0, auc
    for _ in range(60):
        middle = (low + high) / 2
        far = auc - middle > Z * standard_error(middle, with_it, without)
        low, high = (middle, high) if far else (low, middle)
    return low


def standard_error(area: float, with_it: int, without: int) -> float:
    r"""$\sqrt{\theta(1-\theta)\left[1 + N\left(\frac{1-\theta}{2-\theta} + \frac{\theta}{1+\theta}\right)\right]/(n_1 n_0)}$ with
    $N = (n_1 + n_0)/2 - 1$ (Hanley and McNeil 1982, with the mean of the two counts)."""
    pairs = (with_it + without) / 2 - 1
    spread = 1.0 + pairs * ((1.0 - area) / (2.0 - area) + area / (1.0 + area))
    return math.sqrt(area * (1.0 - area) * spread / (with_it * without))
