"""Table 1: test losses of pre-training, from finished runs."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shaped.figures.harness.claims import judge, student
from shaped.figures.harness.page import NoData, Result
from shaped.figures.harness.simulator import Simulator
from shaped.figures.shared import runs
from shaped.train.run_records import RunRecord
from shaped.train.tables import table1

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Shaped Transformers train as well as Pre-LN"
SHOWS = (
    "Loss of masked language modelling on the test text, for each kind of model at its best learning rate and γ. "
    "Left: during the longest pre-training, every run of it. Right: after pre-training; dots: mean over seeds with its standard deviation. "
    "Numbers beside them: the paper's, on other text after 100,000 steps: only their order compares."
)
LINES = ("-", "--", ":")
"""Of the paper's models, and of those with one and with two additions to them (QK-norm, RMSNorm)."""
WITHIN = 0.02
"""By how much the best shaped model may be above Pre-LN: about the paper's own standard deviations in this table."""


def settings(scale: str, places: tuple[Path, ...]) -> runs.Settings:
    return runs.hash_runs(places)


COLUMNS = {
    "name": "model",
    "depth": "depth",
    "steps": "steps",
    "lr": "lr",
    "gamma": "γ",
    "tau0": "τ0",
    "seeds": "seeds",
    "tried": "settings tried",
    "train_loss": "train loss",
    "test_loss": "test loss",
    "test_loss_std": "± std",
    "paper": "paper",
    "paper_std": "± std",
}


def compute(settings: runs.Settings, simulator: Simulator) -> Result:
    found = runs.read_runs(settings, "results of `shaped pretrain`", lambda run: run.metrics or run.result is not None)
    rows = table1(run.result for run in found if run.result is not None)
    if not rows:
        raise NoData(f"runs must have been finished by `shaped pretrain`, got none that was in {', '.join(settings.runs)}")
    table = runs.make_table(rows, COLUMNS)
    numbers = {name: runs.column(rows, name) for name in ("depth", "steps", "test_loss", "test_loss_std", "paper")}
    return Result(
        numbers | collect_curves(found) | {"name": np.array([runs.label(line["name"]) for line in rows])}, judge_losses(rows), table
    )


def collect_curves(found: list[RunRecord]) -> dict[str, np.ndarray]:
    """The test losses of the runs with the most steps, finished or not."""
    longest = max(run.settings["steps"] for run in found)
    arrays = {}
    for i, run in enumerate(run for run in found if run.settings["steps"] == longest):
        lines = [line for line in run.metrics if line["kind"] == "test"]
        arrays[f"curve_{run.kind}_{i}"] = np.array([[line["step"], line["loss"]] for line in lines], dtype=float).reshape(-1, 2)
    return arrays


def judge_losses(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One claim for each depth, number of steps and task (width, batch, text) at which both Pre-LN and a shaped model were trained."""
    claims = []
    places = sorted({(line["depth"], line["steps"], line["task"]) for line in rows})
    alike = Counter(place[:2] for place in places)
    for depth, steps, task in places:
        here = [line for line in rows if (line["depth"], line["steps"], line["task"]) == (depth, steps, task)]
        shaped, baseline = find_best(here, ("recover", "learn", "fixed")), find_best(here, ("preln",))
        if shaped and baseline:
            value = shaped["test_loss"] - baseline["test_loss"]
            names = [runs.label(line["name"]) for line in (shaped, baseline)]
            claim = "d = {}, {} steps: the best shaped model ({}) is as good as {}; test loss beyond it".format(depth, steps, *names)
            id = f"table1.d{depth}.s{steps}"
            if alike[depth, steps] > 1:  # of other text or another width
                id += "." + hashlib.sha256(task.encode()).hexdigest()[:6]
            claims.append(judge(id, None, claim, value, difference_interval(value, shaped, baseline), at_most=WITHIN))
    return claims


def find_best(rows: list[dict[str, Any]], kinds: tuple[str, ...]) -> dict[str, Any] | None:
    """Of the rows of these kinds, with QK-norm or without, the one with the least test loss.

    One seed proves nothing: models with one seed are left out where others have more.
    """
    own = [line for line in rows if runs.find_plain(line["name"]) in kinds]
    several = [line for line in own if line["seeds"] > 1]
    return min(several or own, key=lambda line: line["test_loss"], default=None)


def difference_interval(value: float, *lines: dict[str, Any]) -> tuple[float, float]:
    """The 95 % interval of a difference of means over seeds; infinite if one of them has one seed."""
    if any(line["seeds"] < 2 for line in lines):
        return -math.inf, math.inf
    error = math.sqrt(sum(line["test_loss_std"] ** 2 / line["seeds"] for line in lines))
    reach = student(sum(line["seeds"] - 1 for line in lines)) * error
    return value - reach, value + reach


def draw(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> Figure:
    from shaped.figures.harness.style import BLUE, COLOURS, GREY, ORANGE, SKY, make_panels

    colours = COLOURS | {"recover": BLUE, "learn": ORANGE, "fixed": SKY, "vanilla": COLOURS["unshaped"]}
    figure, (left, right) = make_panels(2, height=max(2.5, 1.1 + 0.28 * len(arrays["name"])))
    named = set()
    for key in (key for key in arrays if key.startswith("curve_")):
        kind = key.split("_")[1]
        label = None if kind in named else runs.label(kind)
        style = "." + LINES[kind.count("-")]
        left.plot(*arrays[key].T, style, color=colours.get(runs.find_plain(kind), GREY), markersize=3, label=label)
        named.add(kind)
    left.set(xlabel="step", ylabel="test loss (nats)")
    left.legend(loc="best")
    at = np.arange(len(arrays["name"]))[::-1]
    spread = np.nan_to_num(arrays["test_loss_std"])
    by_label = {runs.label(kind): colour for kind, colour in colours.items()}
    for place, name, loss, error in zip(at, arrays["name"], arrays["test_loss"], spread, strict=True):
        colour = by_label.get(str(name).split(" with ")[0], GREY)
        right.errorbar([loss], [place], xerr=[error], fmt="o", color=colour, markersize=4, capsize=2)
    # The paper's losses are of other text: beside the axis, which they would stretch.
    beside = right.get_yaxis_transform()
    for place, loss in zip(at, arrays["paper"], strict=True):
        right.text(1.04, place, "–" if np.isnan(loss) else f"{loss:.2f}", transform=beside, va="center", fontsize=7)
    right.text(1.04, len(at) - 0.4, "paper,\nother text", transform=beside, va="bottom", fontsize=7)
    labels = [
        f"{name}, $d={d:.0f}$, {steps:,.0f} steps" for name, d, steps in zip(arrays["name"], arrays["depth"], arrays["steps"], strict=True)
    ]
    right.set(yticks=at, yticklabels=labels, xlabel="test loss (nats)", ylim=(-0.6, len(at) - 0.4))
    return figure


def describe(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    names, depth, steps, loss = (arrays[name] for name in ("name", "depth", "steps", "test_loss"))
    rows = zip(names, depth, steps, loss, strict=True)
    losses = ", ".join(f"{name} (depth {d:.0f}, {s:.0f} steps) {value:.3g}" for name, d, s, value in rows)
    return f"Left: test losses of the longest runs against their steps. Right: test losses in nats at the end: {losses}."
