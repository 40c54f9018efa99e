"""How the numbers of a diagnosis are written."""

from __future__ import annotations

ROUNDING = 2e-6
"""What float32 cannot tell from 1: the digits of a smaller gap are those of the processor's sums, about sixteen roundings."""


def show(value: float, minus: str = "-") -> str:
    """Three digits. A share close to 1 is shown by what is missing."""
    if not 0.999 <= value < 1.0:
        return f"{value:.3g}"
    gap = 1.0 - value
    return f"1 {minus} {gap:.2g}" if gap > ROUNDING else f"1 within {ROUNDING:g}"
