"""Figure 7: the law of the covariance, SDE against network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shaped.figures.harness.jobs import Lab, Result
from shaped.figures.shared import laws
from shaped.layers import ShapedAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "The covariance of shaped attention follows the SDE"
SHOWS = "Density of the covariance of two tokens at the last layer, for shaped attention alone (as the caption says), SDE against network."
settings = laws.settings


def compute(settings: laws.Settings, lab: Lab) -> Result:
    found = lab.run(laws.law_jobs("attention", settings, ShapedAttention(settings.gamma, settings.tau0), lab))
    claims = [
        *laws.pair_claims("fig7.law", "the SDE describes shaped attention", "V", found, "attention", lab),
        *laws.pair_claims("fig7.correlation", "the SDE describes shaped attention", "rho", found, "attention", lab),
    ]
    return Result(laws.drawn_densities("V", found, "attention", lab), claims)


def draw(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> Figure:
    from shaped.figures.harness.style import NARROW, densities_panel, sheet

    figure, (axes,) = sheet(1, NARROW)
    densities_panel(axes, arrays, "V", r"$V^{\alpha\beta}_d$")
    axes.legend(loc="upper right")
    return figure
