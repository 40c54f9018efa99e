"""What a page draws, read back from its picture: every curve is the array that its label, line style and colour say it is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import StepPatch

from shaped.figures.harness import reproduce

BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY, BLACK = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999", "#000000",
)  # fmt: skip
FACES = (("network", "-", "network", BLUE), ("sde", "--", "SDE", BLACK))
UNNAMED = "_"  # matplotlib's labels of lines that the legend leaves out start with it


@dataclass(frozen=True)
class Curve:
    """A line that must be in a panel."""

    panel: int
    values: np.ndarray
    label: str = UNNAMED
    style: str = "-"
    colour: str | None = None
    """None: that of the legend's entry `key`."""
    key: str = ""
    axis: int = 1
    """Are `values` along x (0) or y (1)?"""


@dataclass(frozen=True)
class Picture:
    """A page's arrays and the lines that show them."""

    arrays: dict[str, np.ndarray]
    curves: list[Curve]
    others: int = 0
    """Lines that show no array, such as thresholds."""


def darken(colour: str) -> str:
    red, green, blue = to_rgb(colour)
    return to_hex((red / 2, green / 2, blue / 2))


class Numbers:
    """Arrays of random numbers, by name, no two of which are the same."""

    def __init__(self) -> None:
        self.rng, self.arrays = np.random.default_rng(0), {}

    def add(self, name: str, *shape: int) -> np.ndarray:
        self.arrays[name] = self.rng.uniform(0.1, 0.9, shape)
        return self.arrays[name]

    def add_bounds(self, name: str, count: int) -> np.ndarray:
        """A value with an interval around it for each of `count` points; returns the values."""
        value = self.rng.uniform(0.3, 0.6, count)
        self.arrays[name] = np.stack([value, value - 0.1, value + 0.1], 1)
        return value

    def add_density(self, name: str) -> np.ndarray:
        self.arrays[f"{name}_grid"], self.arrays[f"{name}_edges"] = np.linspace(-0.9, 0.9, 7), np.linspace(-1, 1, 5)
        self.add(f"{name}_heights", 4)
        return self.add(f"{name}_density", 7)

    def add_densities(self, panel: int, name: str) -> list[Curve]:
        return [Curve(panel, self.add_density(f"{name}_{face}"), label, style, colour) for face, style, label, colour in FACES]


def fig1() -> Picture:
    numbers, models = Numbers(), (("shaped", "shaped", BLUE), ("unshaped", "unshaped", VERMILION), ("preln", "Pre-LN", GREEN))
    numbers.arrays["layer"] = np.arange(5.0)
    curves = [Curve(0, numbers.add(f"mean_{name}", 5), label, "-", colour) for name, label, colour in models]
    for name, _, _ in models:
        numbers.add(f"error_{name}", 5)
    return Picture(numbers.arrays, curves + numbers.add_densities(1, "rho"))


def fig2() -> Picture:
    numbers = Numbers()
    numbers.arrays["layer"] = np.arange(1.0, 6.0)
    models = {"shaped": ("shaped", BLUE), "unshaped": ("unshaped", VERMILION), "preln": ("Pre-LN", GREEN), "postln": ("Post-LN", PURPLE)}
    curves = [
        Curve(panel, numbers.add_bounds(f"{weight}_{name}", 5), label, "-", colour)
        for panel, weight in enumerate(("value", "query"))
        for name, (label, colour) in models.items()
    ]
    curves += [
        Curve(panel, numbers.add_bounds(f"{weight}_{name}_law", 5), UNNAMED, "--", darken(colour))
        for panel, weight in enumerate(("value", "query"))
        for name, (_, colour) in models.items()
    ]
    return Picture(numbers.arrays, curves)


def gradients() -> Picture:
    numbers = Numbers()
    numbers.arrays["layer"] = np.arange(1.0, 6.0)
    numbers.add("bands", 2, 5)
    models = {"shaped": ("shaped", BLUE), "qk_norm": ("shaped, QK-norm", SKY), "unshaped": ("unshaped", VERMILION)}
    models |= {"preln": ("Pre-LN", GREEN), "postln": ("Post-LN", PURPLE)}
    curves = []
    for name, (label, colour) in models.items():
        numbers.add(f"quantiles_{name}", 2, 5)
        curves.append(Curve(0, numbers.add(f"median_{name}_exact", 5), label, "-", colour))
        curves.append(Curve(0, numbers.add(f"median_{name}_autograd", 5), UNNAMED, "None", colour))
        curves.append(Curve(0, numbers.add(f"median_{name}_independent", 5), UNNAMED, "--", colour))
        curves.append(Curve(1, numbers.add(f"distance_{name}_exact", 5), UNNAMED, "-", colour))
        curves.append(Curve(1, numbers.add(f"distance_{name}_independent", 5), UNNAMED, "--", colour))
    return Picture(numbers.arrays, curves)


def fig3() -> Picture:
    numbers = Numbers()
    numbers.arrays |= {"gamma": np.array([0.1, 0.5, 1.0]), "drawn": np.array([0.1, 0.5]), "grid": np.linspace(-0.9, 0.9, 7)}
    curves = [Curve(1, numbers.add_bounds(f"percentile_{face}", 3), label, style, colour) for face, style, label, colour in FACES]
    for i, key in enumerate((r"$1/\sqrt{d}$", "$0.5$")):
        curves.append(Curve(0, numbers.add(f"density_{i}_network", 7), key, "-", key=key))
        curves.append(Curve(0, numbers.add(f"density_{i}_sde", 7), UNNAMED, "--", key=key))
    return Picture(numbers.arrays, curves)


def fig4() -> Picture:
    numbers, tau = Numbers(), r"$\tau^2=nn_k$"
    numbers.arrays["layer"] = np.arange(5.0)
    combinations = {
        "id+centre+tau": (f"id, centre, {tau} (shaped)", BLUE),
        "id+centre": ("id, centre", ORANGE),
        "id+tau": (f"id, {tau}", GREEN),
        "id": ("only id", SKY),
        "centre+tau": (f"centre, {tau}", PURPLE),
        "centre": ("only centre", BLACK),
        "tau": (f"only {tau}", GREY),
        "none": ("none (softmax)", VERMILION),
    }
    curves = []
    for name, (label, colour) in combinations.items():
        style = "--" if name in ("id", "centre", "none") else "-"  # they lie on the one with the temperature
        rho, V = numbers.add(f"rho_{name}", 5), numbers.add(f"V_{name}", 5)
        curves += [] if name in ("id", "id+tau") else [Curve(0, rho, label, style, colour)]  # they explode
        curves += [Curve(panel, V, label, style, colour) for panel in (1, 2)]
    median = numbers.add("V_median", 5)
    return Picture(numbers.arrays, [*curves, *(Curve(panel, median, "shaped, median", ":", BLUE) for panel in (1, 2))])


def fig5() -> Picture:
    numbers = Numbers()
    numbers.arrays |= {"gamma": np.array([0.1, 0.5, 0.7]), "drawn": np.array([0.1, 0.7]), "bounds": np.array([1e-4, 1e4])}
    curves = []
    for face, style, label, colour in FACES:
        for gamma in (0.1, 0.7):
            paths = 20 + numbers.add(f"eigenvalues_{gamma:g}_{face}", 6, 2)
            numbers.arrays[f"eigenvalues_{gamma:g}_{face}"] = paths
            curves += [Curve(0, path, UNNAMED, style, key=rf"$\gamma={gamma:g}$") for path in paths.T]
        curves.append(Curve(1, numbers.add_bounds(f"median_{face}", 3), f"{label}, median", style, colour))
        curves.append(Curve(1, numbers.add(f"tenth_{face}", 3), f"{label}, 10th percentile", style, colour))
    return Picture(numbers.arrays, curves, others=2)  # bound and cap


def fig6() -> Picture:
    numbers, curves = Numbers(), []
    for row, model in enumerate(("recover", "preln")):
        for column, layer in enumerate((1, 7)):
            for i, rate in enumerate((5e-4, 1e-3)):
                key = f"{model}_{layer}_{rate:g}_{i}"
                numbers.arrays |= {f"{key}_steps": np.arange(4.0), f"{key}_diverged": np.array(False)}
                curves.append(Curve(2 * row + column, numbers.add(f"{key}_entropy", 4), key=f"lr {rate:g}"))
    return Picture(numbers.arrays, curves, others=8)  # in each panel, collapsed and uniform attention


def fig7() -> Picture:
    numbers = Numbers()
    return Picture(numbers.arrays, numbers.add_densities(0, "V"))


def output() -> Picture:
    numbers, curves = Numbers(), []
    for panel, name in enumerate(("entry", "product")):
        curves += numbers.add_densities(panel, name)
        curves.append(Curve(panel, numbers.add_density(f"{name}_wide"), r"$N(0, V_0 \otimes I)$", "-.", GREY))
    return Picture(numbers.arrays, curves)


def masks() -> Picture:
    numbers, curves = Numbers(), []
    for panel, name in enumerate(("first", "ends", "lengths")):
        curves += numbers.add_densities(panel, name)
        curves.append(Curve(panel, numbers.add_density(f"{name}_full"), "SDE of full attention", "-.", VERMILION))
        curves.append(Curve(panel, numbers.add_density(f"{name}_none"), "SDE without attention", ":", GREEN))
    return Picture(numbers.arrays, curves)


def table1() -> Picture:
    numbers = Numbers()
    numbers.arrays |= {"name": np.array(["Recover", "Pre-LN"]), "depth": np.array([18.0, 18.0]), "steps": np.array([100.0, 100.0])}
    numbers.add("test_loss_std", 2)
    loss = numbers.add("test_loss", 2)
    numbers.arrays["paper"] = np.array([0.01, np.nan])
    curves = [
        Curve(1, loss[:1], UNNAMED, "None", BLUE, axis=0),
        Curve(1, loss[1:], UNNAMED, "None", GREEN, axis=0),
        Curve(0, numbers.add("curve_recover_0", 3, 2)[:, 1], "Recover", "-", BLUE),
        Curve(0, numbers.add("curve_recover_1", 3, 2)[:, 1], UNNAMED, "-", BLUE),
        Curve(0, numbers.add("curve_preln_2", 3, 2)[:, 1], "Pre-LN", "-", GREEN),
    ]
    return Picture(numbers.arrays, curves, others=4)  # the ends of two bars


def table2() -> Picture:
    numbers = Numbers()
    numbers.arrays |= {"name": np.array(["a", "a", "a", "b", "b", "b"]), "task": np.array(["cola", "mrpc", "rte"] * 2)}
    mean, paper = numbers.add("mean", 6), numbers.add("paper", 6)
    numbers.add("std", 6)
    curves = [Curve(panel, mean[panel::3], UNNAMED, "None", BLUE, axis=0) for panel in range(3)]
    return Picture(numbers.arrays, curves + [Curve(panel, paper[panel::3], "paper", "None", BLACK, axis=0) for panel in range(3)], others=6)


PICTURES: dict[str, Callable[[], Picture]] = {
    page.__name__: page for page in (fig1, fig2, fig3, fig4, fig5, fig6, fig7, output, masks, gradients, table1, table2)
}
AXES = {  # part of the labels of the x axes, or, where that tells the panels apart, of the y axes
    "fig1": ("layer", "rho"),
    "fig2": ("W^V", "W^Q"),
    "fig3": ("rho", "gamma"),
    "fig4": ("rho", "V", "enlarged"),
    "fig5": (r"t=\ell/n", "gamma"),
    "fig6": ("Recover, layer 1", "Recover, layer 7", "Pre-LN, layer 1", "Pre-LN, layer 7"),
    "fig7": ("V",),
    "output": ("X", r"\beta"),
    "masks": ("first two tokens", "first and\nthe last token", "length of token 4"),
    "gradients": ("W^Q", "distance"),
    "table1": ("step", "test loss (nats)"),
    "table2": ("Matthews", "F1", "accuracy"),
}


def legend_colours(figure: Figure) -> dict[str, str]:
    """Colour of each entry, of all legends."""
    legends = [legend for axes in figure.axes for legend in axes.findobj(lambda artist: type(artist).__name__ == "Legend")]
    found: dict[str, str] = {}
    for legend in [*legends, *figure.legends]:
        entries: Any = legend
        for handle, text in zip(entries.legend_handles, entries.get_texts(), strict=True):
            if isinstance(handle, Line2D):
                found[text.get_text()] = to_hex(handle.get_color())
    return found


def test_every_page_is_read_back():
    assert PICTURES.keys() | {"fig8"} == set(reproduce.FIGURES + reproduce.TRAINED)


@pytest.mark.parametrize("id", PICTURES)
def test_every_curve_is_what_its_label_says(id):
    picture = PICTURES[id]()
    figure = reproduce.load_page(id).draw({"tokens": 4}, picture.arrays)
    keys, matched = legend_colours(figure), 0
    for panel, words in enumerate(AXES[id]):
        axes = figure.axes[panel]
        assert any(words in text for text in (axes.get_xlabel(), axes.get_ylabel(), axes.get_title())), (id, panel)
    for curve in picture.curves:
        found = [line for line in figure.axes[curve.panel].lines if np.array_equal(line.get_data()[curve.axis], curve.values)]
        assert len(found) == 1, (id, curve.label)
        (line,) = found
        label = str(line.get_label())
        assert (UNNAMED if label.startswith(UNNAMED) else label, line.get_linestyle()) == (curve.label, curve.style), id
        assert to_hex(line.get_color()) == (curve.colour or keys[curve.key]), (id, curve.label)
        matched += 1
    drawn = sum(len(axes.lines) for axes in figure.axes)
    assert drawn == matched + picture.others, "a line is drawn that shows none of the arrays"


@pytest.mark.parametrize("id", ["fig1", "fig7", "output", "masks"])
def test_histograms_are_filled_for_the_network_and_outlines_for_the_sde(id):
    picture = PICTURES[id]()
    steps = [patch for axes in reproduce.load_page(id).draw({"tokens": 4}, picture.arrays).axes for patch in axes.patches]
    filled = {step.get_fill(): np.asarray(step.get_data()[0]).tolist() for step in steps if isinstance(step, StepPatch)}
    last = [name for name in picture.arrays if name.endswith("_sde_heights")][-1]
    assert filled == {True: picture.arrays[last.replace("_sde_", "_network_")].tolist(), False: picture.arrays[last].tolist()}


def test_fig8_has_gamma_to_the_right_and_tau0_upwards():
    values = np.random.default_rng(0).uniform(0.1, 0.9, (2, 3))
    figure = reproduce.load_page("fig8").draw({}, {"gamma": np.array([0.1, 0.2, 0.3]), "tau0": np.array([1.0, 8.0]), "median": values})
    axes, image = figure.axes[0], figure.axes[0].images[0]
    assert np.array_equal(np.asarray(image.get_array()), values)
    assert image.origin == "lower"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0.1", "0.2", "0.3"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["1", "8"]
    shown = {tuple(map(round, text.get_position())): float(text.get_text()) for text in axes.texts}
    assert shown == {(k, i): pytest.approx(values[i, k], abs=0.006) for i in range(2) for k in range(3)}
