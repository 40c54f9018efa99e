"""Every figure's settings at a size that takes a second or two; and pictures that cost nothing, for tests of what happens to pictures."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from shaped.figures.harness import reproduce
from shaped.figures.pages import fig2, fig3, fig4, fig5, fig8, gradients, masks, output
from shaped.figures.shared import laws

LAW = {"n": 64, "d": 48, "samples": 512}
GRID = {"n": 100, "d": 100, "samples": 40}
SETTINGS: dict[str, Any] = {
    "fig1": replace(laws.SCALES["quick"], n=64, d=64, samples=256),
    "fig2": replace(fig2.SCALES["quick"], n=32, d=60, networks=2, sequences=4, drawn=2),
    "fig3": replace(fig3.SCALES["quick"], n=60, d=20, samples=512, gammas=(0.2, 0.6, 1.0), drawn=(0.2, 0.6, 1.0)),
    "fig4": replace(fig4.SCALES["quick"], n=64, d=80, samples=256),
    "fig5": replace(fig5.SCALES["quick"], **GRID, gammas=(0.05, 0.3, 0.7), drawn=(0.05, 0.7), step=1e-3),
    "fig7": replace(laws.SCALES["quick"], **LAW),
    "fig8": replace(fig8.SCALES["quick"], **GRID, gammas=(0.05, 0.3, 0.7), tau0s=(1.0, 64.0)),
    "output": replace(output.SCALES["quick"], **LAW),
    "masks": replace(masks.SCALES["quick"], samples=512),  # at width 64 the network is not near its SDE
    "gradients": replace(gradients.SCALES["quick"], d=12, samples=128),
}
SMALLEST: dict[str, Any] = {
    "fig7": replace(SETTINGS["fig7"], n=16, d=8, samples=64),
    "fig8": replace(SETTINGS["fig8"], n=16, d=16, samples=8, gammas=(0.3, 0.7)),
}
"""For tests to which the numbers do not matter."""


def draw_plainly(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> Figure:
    """A line through all numbers, without text: most of the time of a picture goes into laying out its labels."""
    figure = Figure(figsize=(2, 2))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.plot(np.concatenate([arrays[name].ravel() for name in sorted(arrays)]))
    return figure


def plain_pictures(patch: Callable[[Any, str, Any], None], *ids: str) -> None:
    for id in ids:
        patch(reproduce.load_page(id), "draw", draw_plainly)
