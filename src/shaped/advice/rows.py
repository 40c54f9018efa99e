"""Row: what was found at one gamma and tau0. Boundary: where networks of one tau0 begin to fail."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shaped.intervals import exact_interval

Interval = tuple[float, float]


@dataclass(frozen=True)
class GradientSpread:
    """The squared gradient at the first layer's tokens over that at the last layer's, in one network: its median, and an interval."""

    ratio: float
    interval: Interval
    networks: int
    tokens: int


@dataclass(frozen=True)
class Row:
    """Networks or paths of the limit at one gamma and tau0, and how many of them failed."""

    law: str
    """"network" (exact, of finite width), "limit" (the covariance SDE), or the name of a block to compare with."""
    gamma: float
    tau0: float
    count: int
    aligned: int
    exploded: int
    correlation: float
    """Median of the mean absolute correlation over pairs of tokens, at the last layer."""
    growth: float
    """Median of the stream's length at the last layer over that at the start."""
    gradient: GradientSpread | None = None

    @property
    def failed(self) -> int:
        return self.aligned + self.exploded

    @property
    def share(self) -> float:
        return self.failed / self.count

    @cached_property
    def interval(self) -> Interval:
        """Of the share that fails. Each end holds with 95 % confidence (exact binomial)."""
        return exact_interval(self.failed, self.count)

    def verdict(self, share: float) -> str:
        """ "safe" or "unsafe" if the whole interval is below or above the share that may fail; "open" if it is on both sides."""
        low, high = self.interval
        return "safe" if high < share else "unsafe" if low > share else "open"


@dataclass(frozen=True)
class Boundary:
    """Where, on the grid of gammas, the networks or the limit's paths of one tau0 begin to fail."""

    law: str
    tau0: float
    below: Row | None
    """The largest gamma at which no more fail than may; None if they fail at the smallest."""
    above: Row | None
    """The next gamma; None if `below` is the largest of the grid."""
    unsafe: Row | None
    """The smallest gamma above that is proved to be unsafe; None if none is."""
