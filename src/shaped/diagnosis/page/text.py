"""Numbers of the page beside those of `shaped.html.text`."""

from __future__ import annotations

from shaped.diagnosis import numbers
from shaped.html.text import show


def show_share(value: float | None) -> str:
    """A share close to 1 is shown by what is missing."""
    return numbers.show(value, "−") if value is not None and 0.999 <= value < 1.0 else show(value)
