"""Figure 6: the entropy of the attention in training, for several learning rates, from finished or unfinished runs."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shaped.figures.harness.claims import judge, mean_interval
from shaped.figures.harness.page import Result
from shaped.figures.harness.simulator import Simulator
from shaped.figures.shared import runs
from shaped.nn.diagnostics import QUANTITIES
from shaped.train.tables import entropy_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "The baseline's attention collapses at large learning rates"
SHOWS = (
    "Mean entropy of the softmax, over rows and heads, of the first and the seventh layer against training steps, for each learning rate; "
    "a row for each model. A cross: loss or gradient no longer finite. Dotted: below it we call attention collapsed. "
    "Dash-dotted: uniform attention over the 128 tokens of a sequence."
)
LAYERS, MODELS = (1, 7), ("recover", "preln", "recover-qk", "preln-qk")
COLLAPSING = "preln"
"""The paper says so of this model. QK-norm bounds the logits, so the attention of models that have it should not collapse."""
COLLAPSED, LARGE = 0.5, 1e-3
"""Below this entropy, in nats, attention counts as a point mass: a tenth of log 128. And the learning rate that the caption calls large."""
UNIFORM = math.log(128)  # the entropy of uniform attention over a sequence of the paper's length


def settings(scale: str, places: tuple[Path, ...]) -> runs.Settings:
    return runs.hash_runs(places)


def compute(settings: runs.Settings, simulator: Simulator) -> Result:
    what = "metrics of Recover or Pre-LN, with QK-norm or without"
    found = runs.read_runs(settings, what, lambda run: run.kind in MODELS and entropy_curves([run], LAYERS))
    curves = select_recipes(entropy_curves(found, LAYERS))
    return Result(to_arrays(curves), judge_curves(curves))


def to_arrays(curves: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for i, curve in enumerate(curves):
        key = f"{curve['name']}_{curve['layer']}_{curve['lr']:g}_{i}"
        arrays[f"{key}_steps"], arrays[f"{key}_entropy"] = (np.array(curve[name], dtype=float) for name in ("steps", "entropy"))
        arrays[f"{key}_diverged"] = np.array(curve["diverged"])
    return arrays


def select_recipes(curves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each model the curves of one recipe: the one that was run at the most learning rates."""
    selected = []
    for model in MODELS:
        rates: dict[str, set[float]] = {}
        for curve in curves:
            if curve["name"] == model:
                rates.setdefault(curve["recipe"], set()).add(curve["lr"])
        if rates:
            recipe = max(rates, key=lambda one: len(rates[one]))
            selected += [curve for curve in curves if (curve["name"], curve["recipe"]) == (model, recipe)]
    return selected


def judge_curves(curves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each learning rate from LARGE on: the mean over seeds of the last entropy, with its 95 % interval.

    As in table1, one seed proves nothing, and runs of the same seed count as one, with their mean. Only runs that ended count, and of
    those only the runs that were planned with the most steps.
    """
    claims = []
    for layer in LAYERS:
        for model in sorted(MODELS):
            here = [curve for curve in curves if (curve["name"], curve["layer"]) == (model, layer) and curve["ended"]]
            for rate in sorted({curve["lr"] for curve in here if curve["lr"] >= LARGE}):
                steps = max(curve["planned"] for curve in here if curve["lr"] == rate)
                last: dict[int, list[float]] = {}
                for curve in here:
                    if (curve["lr"], curve["planned"]) == (rate, steps):
                        last.setdefault(curve["seed"], []).append(curve["entropy"][-1])
                value, interval = mean_interval(np.array([statistics.fmean(of_seed) for of_seed in last.values()]))
                collapses = model == COLLAPSING
                bound: dict[str, Any] = {"at_most" if collapses else "at_least": COLLAPSED}
                words = f"{runs.label(model)}: {'the entropy collapses' if collapses else 'it does not'}"
                claim = f"layer {layer}, learning rate {rate:g}: {words}; nats at the last step"
                id = f"fig6.{model}.layer{layer}.lr{rate:g}"
                claims.append(judge(id, None, claim, value, interval, **bound))
    return claims


def draw(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from shaped.figures.harness.style import BLACK, WIDE, pick_ordered_colours

    keys = [name.removesuffix("_steps") for name in arrays if name.endswith("_steps")]
    models = [model for model in MODELS if any(key.split("_")[0] == model for key in keys)]
    figure = Figure(figsize=(WIDE, 0.6 + 2.0 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), 2, sharex=True, sharey=True, squeeze=False)
    rates = sorted({float(key.split("_")[2]) for key in keys})
    colours = dict(zip(rates, pick_ordered_colours(len(rates)), strict=True))
    highest = max([UNIFORM, *(np.nan_to_num(arrays[f"{key}_entropy"]).max() for key in keys)])  # longer sequences have more
    for row_of, model in zip(panels, models, strict=True):
        for axes, layer in zip(row_of, LAYERS, strict=True):
            for key in keys:
                name, its_layer, rate, *_ = key.split("_")
                if (name, int(its_layer)) == (model, layer):
                    steps, entropy, colour = arrays[f"{key}_steps"], arrays[f"{key}_entropy"], colours[float(rate)]
                    axes.plot(steps, entropy, color=colour)
                    if arrays[f"{key}_diverged"]:
                        axes.plot(steps[-1:], entropy[-1:], "x", color=colour, markersize=6, clip_on=False)
            axes.axhline(COLLAPSED, color=BLACK, linewidth=0.8, linestyle=":")
            axes.axhline(UNIFORM, color=BLACK, linewidth=0.8, linestyle="-.")
            axes.set_title(f"{runs.label(model)}, layer {layer}")
    handles = [Line2D([], [], color=colours[rate], label=f"lr {rate:g}") for rate in rates]
    handles += [
        Line2D([], [], color=BLACK, linewidth=0.8, linestyle="-.", label="log 128: uniform attention"),
        Line2D([], [], color=BLACK, linewidth=0.8, linestyle=":", label=f"below {COLLAPSED:g}: collapsed"),
        Line2D([], [], color=BLACK, linestyle="none", marker="x", markersize=6, label="diverged"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=4)
    for axes in panels[-1]:
        axes.set_xlabel("step")
    for axes in panels[:, 0]:
        axes.set(ylabel=QUANTITIES["entropy"].label, ylim=(0, 1.05 * highest))
    return figure


def describe(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    ends: dict[str, list[str]] = {}
    for key in (name.removesuffix("_entropy") for name in arrays if name.endswith("_entropy")):
        model, layer, rate, *_ = key.split("_")
        diverged = ", diverged" if arrays[f"{key}_diverged"] else ""
        said = f"{arrays[f'{key}_entropy'][-1]:.2g} nats at step {arrays[f'{key}_steps'][-1]:.0f} (rate {rate}{diverged})"
        ends.setdefault(f"{runs.label(model)}, layer {layer}", []).append(said)
    listed = "; ".join(f"{panel}: {', '.join(of)}" for panel, of in ends.items())
    return f"Curves of entropy, one for each run; the line of uniform attention is at {UNIFORM:.2f} nats. They end at: {listed}."
