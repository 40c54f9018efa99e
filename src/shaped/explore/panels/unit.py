"""What every unit of an answer gives: charts of panels, one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shaped.explore.charts import Chart

Breathe = Callable[[int], None]
"""Called between steps of a simulation. It raises where the question is cancelled."""


class Found(NamedTuple):
    panel: str
    samples: int
    chart: Chart
    stage: int | None = None
    """Where it is not the stage that was asked for."""
