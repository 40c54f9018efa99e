"""Intervals of what is counted."""

from __future__ import annotations

import math

Z = 1.959964  # of 95 %


def share_interval(happened: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of the chance of something that happened so often in `count` independent trials.

    It has a width also where it happened never, or always.
    """
    share = happened / count
    centre, spread = share + Z**2 / (2 * count), Z * math.sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2)
    low, high = (centre - spread) / (1 + Z**2 / count), (centre + spread) / (1 + Z**2 / count)
    return (max(0.0, low) if happened else 0.0), (min(1.0, high) if happened < count else 1.0)


def format_share(share: float, count: int) -> str:
    """A share of so many trials with its interval, such as "0.073 % (0.025 to 0.215)"."""
    low, high = share_interval(round(share * count), count)
    return f"{100 * share:.3f} % ({100 * low:.3f} to {100 * high:.3f})"
