"""Curves of predictions by layer, several models in one picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from shaped.figures.harness.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, WIDE, apply_style
from shaped.hf.prediction.result import Prediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
LABELS = {"rho": r"mean correlation $\rho$", "length": "length", "entropy": "entropy (nats)", "rank": "effective rank"}
BAND = (5, 95)  # percent of the models


def draw_predictions(predictions: Mapping[str, Prediction]) -> Figure:
    """A panel for each quantity: medians over the depth, and bands in which 90 % of the models lie."""
    from matplotlib.figure import Figure

    with apply_style():
        figure = Figure(figsize=(WIDE, 4.8), layout="constrained")
        panels = figure.subplots(2, 2).ravel()
        for number, (name, prediction) in enumerate(predictions.items()):
            colour, style = COLOURS[number % len(COLOURS)], ("-", "--", ":")[number // len(COLOURS) % 3]
            for axes, quantity in zip(panels, LABELS, strict=True):
                values = getattr(prediction, quantity).numpy()
                depth = len(prediction.entropy)
                low, middle, high = np.percentile(values, (BAND[0], 50, BAND[1]), axis=1)
                place = np.arange(len(values)) / depth
                axes.fill_between(place, low, high, color=colour, alpha=0.2, linewidth=0)
                axes.plot(place, middle, style, color=colour, label=f"{name} ({depth} layers)")
        for axes, (quantity, label) in zip(panels, LABELS.items(), strict=True):
            axes.set(xlabel="layer / depth", ylabel=label, xlim=(0, 1))
            if quantity == "length":
                axes.set_yscale("log")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(3, len(predictions)))
    return figure
