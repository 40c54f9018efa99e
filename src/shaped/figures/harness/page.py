"""Page: one figure or table of the report.

A page is a module in `figures/pages/` with the six names of `Page`, and its file name is its id. `pages/fig7.py` is the shortest.
CONTRIBUTING.md, "A new figure", lists the other places that a new one needs.

Thresholds of claims are constants of the module, with their source, fixed before the first run; `claims.judge` holds an interval against
them. Code that two pages need goes to `figures/shared/`: a page never imports another page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shaped.figures.harness.claims import Row
from shaped.figures.harness.simulator import Simulator

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class NoData(ValueError):
    """The training runs have nothing that the page could show."""


@dataclass(frozen=True)
class Result:
    """What a page computes: the numbers it is drawn from, and its claims."""

    arrays: dict[str, np.ndarray]
    claims: list[Row]
    table: dict[str, Any] = field(default_factory=dict)
    """Optional, for the report: {"columns": [...], "rows": [[...], ...]}, texts and numbers."""


class Page(Protocol):
    """What a module in `figures/pages/` defines."""

    TITLE: str
    """One line: what the page shows if the paper is right."""
    SHOWS: str
    """The caption."""

    def settings(self, scale: str, /, *runs: tuple[Path, ...]) -> Any:
        """A dataclass of plain values: all that determines the numbers, except tokens, seed and device.

        A page in `TRAINED` is also given the places of the runs. Its settings hold a hash of the runs, so that it is computed again when
        they change.
        """

    def compute(self, settings: Any, simulator: Simulator, /) -> Result:
        """Hands its simulations to `simulator.run` and judges its claims for each of `simulator.token_counts`."""
        ...

    def draw(self, summary: dict[str, Any], arrays: dict[str, np.ndarray], /) -> Figure:
        """Draws from what was saved, and computes nothing. Imports matplotlib only here."""
        ...

    def describe(self, summary: dict[str, Any], arrays: dict[str, np.ndarray], /) -> str:
        """What is seen in the picture, with its numbers, in one or two sentences: the alternative text. It does not repeat the title."""
        ...
