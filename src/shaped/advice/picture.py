"""The picture of an advice: the map of gamma and tau0, and the shares of networks that fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shaped.advice.question import Question
from shaped.advice.rows import Boundary, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, GREY, VERMILION = "#0072B2", "#999999", "#D55E00"  # of Okabe and Ito, which colour-blind people can tell apart
COLOURS = {"safe": BLUE, "open": GREY, "unsafe": VERMILION}
MARKERS = {"safe": "o", "open": "s", "unsafe": "X"}
LINES = {"network": "-", "limit": "--"}
NAMES = {"network": "networks", "limit": "limit (SDE)"}
LEAST_SHARE = 3e-4  # shares of 0 are drawn here, on a logarithmic axis


def draw_advice(asked: Question, rows: list[Row], boundaries: list[Boundary], best: Row | None) -> Figure:
    """Rows and boundaries of networks and of the limit. `best` is marked."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 8, "legend.fontsize": 7, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        places, shares = figure.subplots(1, 2)
        draw_map(places, rows, boundaries, best, asked.share)
        draw_shares(shares, rows, asked.share)
        figure.suptitle(f"width {asked.n}, depth {asked.d}, {asked.m} tokens, {asked.heads} heads")
    return figure


def draw_map(axes: Axes, rows: list[Row], boundaries: list[Boundary], best: Row | None, share: float) -> None:
    """Every place that was simulated with networks, and where networks and limit begin to fail."""
    networks = [row for row in rows if row.law == "network"]
    gammas = [row.gamma for row in rows]
    floor, ceiling = min(gammas) / 1.2, max(gammas) * 1.2
    for law, line in LINES.items():
        ends = [one for one in boundaries if one.law == law]
        tau0 = [one.tau0 for one in ends]
        reached = [floor if one.below is None else one.below.gamma for one in ends]
        axes.plot(tau0, reached, line, color="black", linewidth=1.0, label=f"largest good gamma, {NAMES[law]}")
        if law == "network":
            axes.fill_between(tau0, floor, reached, color=BLUE, alpha=0.12, linewidth=0)
    for verdict, colour in COLOURS.items():
        chosen = [row for row in networks if row.verdict(share) == verdict]
        place = [row.tau0 for row in chosen], [row.gamma for row in chosen]
        axes.scatter(*place, s=16, color=colour, marker=MARKERS[verdict], label=f"networks: {verdict}", zorder=3)
    if best is not None:
        axes.scatter(best.tau0, best.gamma, s=90, facecolor="none", edgecolor="black", label="answer", zorder=4)
    axes.set(xscale="log", yscale="log", xlabel=r"$\tau_0$", ylabel=r"$\gamma$", ylim=(floor, ceiling))
    show_plain_numbers(axes)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)


def draw_shares(axes: Axes, rows: list[Row], share: float) -> None:
    """The share that fails against gamma, with intervals; a colour for each tau0."""
    from matplotlib import colormaps

    temperatures = sorted({row.tau0 for row in rows})
    for place, tau0 in enumerate(temperatures):
        colour = colormaps["viridis"](0.8 * place / max(1, len(temperatures) - 1))
        for law, line in LINES.items():
            series = [row for row in rows if row.law == law and row.tau0 == tau0]
            draw_row_intervals(axes, series, colour, line, place, f"{NAMES[law]}, tau0 = {tau0:.3g}")
    axes.axhline(share, color=GREY, linewidth=0.8, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel=r"$\gamma$", ylabel="share that fails (0 at the bottom)", ylim=(LEAST_SHARE / 1.3, 1.3))
    show_plain_numbers(axes)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)


def draw_row_intervals(axes: Axes, rows: list[Row], colour: Any, line: str, place: int, label: str) -> None:
    """Series lie a little beside each other, so that their intervals do not hide each other."""
    shares = np.array([row.share for row in rows])
    low, high = np.array([row.interval for row in rows]).T
    gammas = np.array([row.gamma for row in rows]) * 1.012 ** (2 * place + (line == "--"))
    shown, low = np.maximum(shares, LEAST_SHARE), np.maximum(low, LEAST_SHARE)
    errors = np.array([shown - low, high - shown]).clip(min=0.0)
    axes.errorbar(gammas, shown, errors, fmt=f"o{line}", markersize=2.5, linewidth=0.9, elinewidth=0.6, label=label, color=colour)


def show_plain_numbers(axes: Axes) -> None:
    """0.1 and 0.2 in place of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if axes.get_ylim()[0] > 0.01 else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
