"""One style for all pictures: one colour a model, solid lines for networks, dashed for the SDE, readable at the width of a column."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, which colour-blind people can tell apart.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY, BLACK = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#000000",
)  # fmt: skip
COLOURS = {"shaped": BLUE, "unshaped": VERMILION, "preln": GREEN, "postln": PURPLE}
NAMES = {"shaped": "shaped", "unshaped": "unshaped", "preln": "Pre-LN", "postln": "Post-LN"}
LINES: dict[str, Any] = {"network": "-", "sde": "--"}
FACE_NAMES = {"network": "network", "sde": "SDE"}

WIDE, NARROW = 6.75, 4.2  # inches: two or three panels, and one
DPI = 300  # of the report's pictures, which show two pixels in the place of one
LOOK: Any = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "mathtext.fontset": "cm",
}


@contextmanager
def apply_style() -> Iterator[None]:
    from matplotlib import rc_context

    with rc_context(LOOK):
        yield


def make_panels(columns: int, width: float = WIDE, height: float = 2.5, **how: Any) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side; `how` goes to matplotlib's `subplots`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(np.atleast_1d(figure.subplots(1, columns, **how)))


def darken(colour: str) -> Any:
    """Half as bright: for a line that lies on another one of this colour."""
    from matplotlib.colors import to_rgb

    return tuple(part / 2 for part in to_rgb(colour))


def pick_ordered_colours(count: int) -> list[Any]:
    """Colours for an ordered family, from dark to light in even steps, also in print."""
    from matplotlib import colormaps

    return [colormaps["viridis"](x) for x in np.linspace(0.0, 0.82, count)]


def draw_line_key(axes: Axes, **how: Any) -> None:
    """A legend which says that solid lines are networks and dashed lines the SDE; `how` goes to matplotlib's `legend`."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=BLACK, linestyle=LINES[face], linewidth=1.0, label=FACE_NAMES[face]) for face in LINES]
    axes.add_artist(axes.legend(handles=handles, **how))


def draw_densities(axes: Axes, arrays: dict[str, np.ndarray], name: str, label: str) -> None:
    """Histograms and kernel density estimates of network and SDE, in one panel."""
    tallest = 0.0
    for face, title in FACE_NAMES.items():
        key = f"{name}_{face}"
        solid = face == "network"
        axes.stairs(
            arrays[f"{key}_heights"],
            arrays[f"{key}_edges"],
            fill=solid,
            color=BLUE if solid else BLACK,
            alpha=0.22 if solid else 0.45,
            linewidth=0 if solid else 0.5,
            label=f"{title}, histogram",
        )
        grid, density = arrays[f"{key}_grid"], arrays[f"{key}_density"]
        axes.plot(grid, density, LINES[face], color=BLUE if solid else BLACK, linewidth=1.6 if solid else 1.0, label=title)
        tallest = max(tallest, arrays[f"{key}_heights"].max(), density[np.abs(grid) < 0.96].max(initial=0.0))
    # Near the ends of a correlation's range there may be a spike of few samples, which is not to choose the axis.
    axes.set(xlabel=label, ylabel="density", ylim=(0, 1.05 * tallest if name.startswith("rho") else None))
    axes.margins(x=0)


def sort_densities(axes: Axes) -> list[Any]:
    """The legend's handles of a panel with densities: network, its histogram, SDE, its histogram, then the others."""
    handles, labels = axes.get_legend_handles_labels()
    first = [f"{title}{kind}" for title in FACE_NAMES.values() for kind in ("", ", histogram")]
    return [handles[labels.index(label)] for label in (*first, *(label for label in labels if label not in first))]


def describe_densities(arrays: dict[str, np.ndarray], name: str, symbol: str) -> str:
    """What is seen of them: where the network's is highest, and how far the SDE's is from it."""
    grid, network, sde = (arrays[f"{name}_{array}"] for array in ("network_grid", "network_density", "sde_density"))
    if network.max() <= 0.0:  # nothing is left of networks that all exploded
        return f"the network has no density, the SDE's is {'none either' if sde.max() <= 0.0 else f'highest near {grid[sde.argmax()]:.2g}'}"
    peak, gap = grid[network.argmax()], np.abs(network - sde).max() / network.max()
    return f"the network's density is highest near {symbol} = {peak:.2g}, and the SDE's differs by up to about {gap:.0%} of that height"
