"""Marks of the pictures beside their curves: legends, labels, axes, and the text that says what is seen."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from test_pictures import BLUE, GREEN, PICTURES, VERMILION

from shaped.commands import converge
from shaped.figures.harness import reproduce

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FIG8 = {"gamma": np.array([0.1, 0.3]), "tau0": np.array([1.0, 8.0]), "median": np.array([[0.5, 0.04], [1.0, 0.7]])}


def draw(id: str, **other: np.ndarray) -> Figure:
    return reproduce.load_page(id).draw({"tokens": 4}, PICTURES[id]().arrays | other)


def list_legend(figure: Figure) -> list[str]:
    """The entries of all legends."""
    legends: list[Any] = [*figure.legends, *(legend for axes in figure.axes if (legend := axes.get_legend()) is not None)]
    return [text.get_text() for legend in legends for text in legend.get_texts()]


def list_texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("id", ["fig1", "fig7", "output", "masks"])
def test_curves_and_histograms_are_in_the_legend(id):
    assert {"network", "network, histogram", "SDE", "SDE, histogram"} <= set(list_legend(draw(id)))


def test_fig1_has_its_bands_in_the_legend_and_densities_to_the_ends():
    grid = np.linspace(-0.999, 0.999, 7)
    spike = np.array([0.1, 0.2, 0.5, 0.6, 0.7, 0.6, 90.0])
    figure = draw("fig1", rho_network_grid=grid, rho_sde_grid=grid, rho_network_density=spike)
    assert "95 % interval of a mean" in list_legend(figure)
    density = figure.axes[1]
    assert all(np.array_equal(line.get_xdata(), grid) for line in density.lines)
    assert 0.7 < density.get_ylim()[1] < 1.0, "a spike of few samples near the end does not choose the axis"


def test_fig4_no_curve_hides_another():
    """Of two combinations that differ only in their temperature one is broad, the other thin and dashed, and drawn after it."""
    page: Any = reproduce.load_page("fig4")
    for axes in draw("fig4").axes:
        lines = {line.get_label(): line for line in axes.lines}
        order = [line.get_label() for line in sorted(axes.lines, key=lambda line: line.get_zorder())]
        for below, above in (("id+tau", "id"), ("centre+tau", "centre"), ("tau", "none")):
            first, second = (page.label_of(name) for name in (below, above))
            if first in lines:
                assert order.index(first) < order.index(second)
                assert lines[first].get_linewidth() >= 3 * lines[second].get_linewidth()
                assert (lines[first].get_linestyle(), lines[second].get_linestyle()) == ("-", "--")


def test_fig4_enlarges_what_lies_near_the_start():
    low, high = draw("fig4").axes[2].get_ylim()
    assert (low, high) == (0.1, 1.0)


def test_fig5_shows_the_sde_and_names_its_bounds():
    """Its paths end within thousandths of the axis: on a logarithmic one they are seen."""
    paths, times = draw("fig5").axes
    assert paths.get_xscale() == "log"
    first = paths.get_xlim()[0]
    assert first > 0
    assert all(np.asarray(line.get_xdata()).min() >= first for line in paths.lines[:-1]), "time 0 is drawn at the edge"
    assert "upper bound $10^{4}$" in list_texts(paths)[0]
    assert "lower bound $10^{-4}$" in list_texts(paths)[1]
    assert list_texts(times) == ["cap"]
    assert {"network", "SDE", r"$\gamma=0.1$"} <= set(list_legend(draw("fig5")))


def test_fig6_has_its_threshold_crosses_and_uniform_attention_in_the_legend():
    figure = draw("fig6")
    assert {"log 128: uniform attention", "below 0.5: collapsed", "diverged"} <= set(list_legend(figure))
    for axes in figure.axes:
        heights = [float(np.asarray(line.get_ydata())[0]) for line in axes.lines if line.get_linestyle() in (":", "-.")]
        assert heights == [0.5, pytest.approx(math.log(128))]
        assert axes.get_ylim()[1] > math.log(128)


def test_table1_is_coloured_by_recipe_and_its_axis_is_of_its_own_losses():
    left, right = draw("table1", test_loss_std=np.array([0.01, np.nan]), paper=np.array([-3.0, np.nan])).axes
    dots = [line for line in right.lines if line.get_marker() == "o"]
    assert [to_hex(line.get_color()) for line in dots] == [BLUE, GREEN]
    assert right.get_xlim()[0] > 0, "the paper's loss, of other text, is beside the axis"
    assert {"-3.00", "–"} <= set(list_texts(right))
    arrays = {f"curve_{kind}_0": np.array([[1.0, 2.0], [2.0, 1.0]]) for kind in ("preln", "preln-qk", "preln-rms-qk")}
    more = draw("table1", name=np.array(["Recover with QK-norm", "Pre-LN with RMSNorm and QK-norm"]), **arrays).axes
    dots = [line for line in more[1].lines if line.get_marker() == "o"]
    assert [to_hex(line.get_color()) for line in dots] == [BLUE, GREEN]
    styles = {str(line.get_label()): (line.get_linestyle(), to_hex(line.get_color())) for line in more[0].lines}
    assert styles["Pre-LN with QK-norm"] == ("--", GREEN)
    assert styles["Pre-LN with RMSNorm and QK-norm"] == (":", GREEN)
    assert [axes.get_xlabel() for axes in (left, right)] == ["step", "test loss (nats)"]


def test_masks_has_its_axes_in_words():
    labels = [axes.get_xlabel() for axes in draw("masks").axes]
    assert not any("$" in label for label in labels)
    assert [word in label for label, word in zip(labels, ("artanh", "artanh", "log"), strict=True)] == [True] * 3


def test_converge_draws_the_lines_that_it_fits(monkeypatch):
    summary = json.loads((RESULTS / "converge-narrow.json").read_text())
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, buffer, **how: drawn.append(figure))
    converge.draw(summary)
    for axes, measure in zip(drawn[0].axes, converge.MEASURES, strict=True):
        for name, colour in (("rho", BLUE), ("V", VERMILION)):
            rate = summary["rates"][name][measure]
            lines = [line for line in axes.lines if to_hex(line.get_color()) == colour]
            (line,) = [line for line in lines if f"{-rate['rate']:.2f}" in str(line.get_label())]
            x, y = (np.log(np.asarray(values, dtype=float)) for values in line.get_data())
            assert np.allclose(np.diff(y) / np.diff(x), -rate["rate"])
            first = summary["rows"][0]["distances"][name][measure]
            assert abs(np.exp(y[0]) - first["value"]) < 2 * first["error"]
    assert any("one law" in label for label in list_legend(drawn[0]))
    summary["rates"], summary["rows"] = {}, summary["rows"][:2]
    converge.draw(summary)  # too few widths for a line
    assert not any("fit" in label for label in list_legend(drawn[1]))


@pytest.mark.parametrize("id", [*reproduce.FIGURES, *reproduce.TRAINED])
def test_the_text_says_what_is_seen(id):
    """With numbers of the arrays, and other than title and caption."""
    page: Any = reproduce.load_page(id)
    arrays = FIG8 if id == "fig8" else PICTURES[id]().arrays
    text = page.describe({"tokens": 4}, arrays)
    assert page.TITLE not in text
    assert text not in page.SHOWS
    assert len(re.findall(r"\d", text)) > 4
    assert text.endswith(".")
    assert not re.search(r"nan|inf\b|\$|\\", text)
    fixed = {"gamma", "drawn", "bounds"}  # parts of other arrays' names
    halved = {name: array if name in fixed or array.dtype != float else array / 2 for name, array in arrays.items()}
    assert page.describe({"tokens": 4}, halved) != text


def test_no_text_says_what_other_data_would_make_false():
    """Falling percentiles, losses that rise, entropies above log 128, a model that the paper does not have, networks that all exploded."""
    arrays = PICTURES["fig3"]().arrays
    falling = arrays | {"percentile_network": arrays["percentile_network"][::-1]}
    assert "rises" not in reproduce.load_page("fig3").describe({}, falling)
    assert "fall" not in reproduce.load_page("table1").describe({}, PICTURES["table1"]().arrays)
    arrays = PICTURES["fig6"]().arrays
    high = {name: array + 5.0 if name.endswith("_entropy") else array for name, array in arrays.items()}
    assert "below" not in reproduce.load_page("fig6").describe({}, high)
    top = max(array.max() for name, array in high.items() if name.endswith("_entropy"))
    assert reproduce.load_page("fig6").draw({}, high).axes[0].get_ylim()[1] > top > math.log(128)
    arrays = PICTURES["table2"]().arrays
    assert "no paper's" in reproduce.load_page("table2").describe({}, arrays | {"paper": np.full_like(arrays["paper"], np.nan)})
    arrays = PICTURES["fig7"]().arrays
    gone = arrays | {"V_network_density": np.zeros_like(arrays["V_network_density"])}
    text = reproduce.load_page("fig7").describe({}, gone)
    assert "the network has no density" in text
    assert len(text) < 200
    assert "temperature lie on each other" not in reproduce.load_page("fig4").describe({}, PICTURES["fig4"]().arrays)
