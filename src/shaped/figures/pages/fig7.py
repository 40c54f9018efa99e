"""Figure 7: the law of the covariance, SDE against network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shaped.figures.harness.page import Result
from shaped.figures.harness.simulator import Simulator
from shaped.figures.shared import laws
from shaped.layers import ShapedAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "The covariance of shaped attention follows the SDE"
SHOWS = "Density of the covariance of two tokens at the last layer, for shaped attention alone (as the caption says), SDE against network."
settings = laws.settings


def compute(settings: laws.Settings, simulator: Simulator) -> Result:
    found = simulator.run(laws.make_law_jobs("attention", settings, ShapedAttention(settings.gamma, settings.tau0), simulator))
    claims = [
        *laws.judge_pairs("fig7.law", "the SDE describes shaped attention", "V", found, "attention", simulator),
        *laws.judge_pairs("fig7.correlation", "the SDE describes shaped attention", "rho", found, "attention", simulator),
    ]
    return Result(laws.estimate_densities("V", found, "attention", simulator), claims)


def draw(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> Figure:
    from shaped.figures.harness.style import NARROW, draw_densities, make_panels, sort_densities

    figure, (axes,) = make_panels(1, NARROW)
    draw_densities(axes, arrays, "V", r"$V^{\alpha\beta}_d$")
    axes.legend(handles=sort_densities(axes), loc="upper right")
    return figure


def describe(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    from shaped.figures.harness.style import describe_densities

    grid = arrays["V_network_grid"]
    return f"Two densities over covariances from {grid[0]:.2g} to {grid[-1]:.2g}: {describe_densities(arrays, 'V', 'V')}."
