"""Confidence intervals of shares."""

from __future__ import annotations

import math

Z = 1.959964  # normal quantile of a 95 % interval


def share_interval(happened: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a probability, for an event that happened `happened` times in `count` independent trials.

    Its width is positive even if the event happened never or always.
    """
    share = happened / count
    centre, spread = share + Z**2 / (2 * count), Z * math.sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2)
    low, high = (centre - spread) / (1 + Z**2 / count), (centre + spread) / (1 + Z**2 / count)
    return (max(0.0, low) if happened else 0.0), (min(1.0, high) if happened < count else 1.0)


def format_share(share: float, count: int) -> str:
    """A share of `count` trials with its interval as text, such as "0.073 % (0.025 to 0.215)"."""
    low, high = share_interval(round(share * count), count)
    return f"{100 * share:.3f} % ({100 * low:.3f} to {100 * high:.3f})"
