"""Table 2: GLUE scores of finished and fine-tuned runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shaped.figures.harness.page import Result
from shaped.figures.harness.simulator import Simulator
from shaped.figures.shared import runs
from shaped.train.tables import table2

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "What pre-training is worth on GLUE"
SHOWS = (
    "Scores of fine-tuned models on the development sets of CoLA (Matthews correlation), MRPC (F1) and RTE (accuracy). "
    "Dots: mean over seeds with its standard deviation; crosses: the paper's. The paper makes no claim that this table could fail."
)
TASKS = ("cola", "mrpc", "rte")
COLUMNS = {"name": "model", "depth": "depth", "steps": "steps", "lr": "lr", "gamma": "γ", "task": "task", "score": "score"}
COLUMNS |= {"mean": "mean", "std": "± std", "seeds": "seeds", "paper": "paper"}


def settings(scale: str, places: tuple[Path, ...]) -> runs.Settings:
    return runs.hash_runs(places)


def compute(settings: runs.Settings, simulator: Simulator) -> Result:
    rows = table2(runs.read_runs(settings, "scores from `shaped glue`", lambda run: run.glue))
    numbers = {name: runs.column(rows, name) for name in ("mean", "std", "paper")}
    words = {"task": [line["task"] for line in rows], "name": make_labels(rows)}
    return Result(numbers | {name: np.array(texts) for name, texts in words.items()}, [], runs.make_table(rows, COLUMNS))


def make_labels(rows: list[dict[str, Any]]) -> list[str]:
    """Model and depth, and the settings in which runs of the same model and depth differ."""

    def differences(line: dict[str, Any]) -> list[str]:
        alike = [other for other in rows if (other["name"], other["depth"]) == (line["name"], line["depth"])]
        differ = [key for key in ("steps", "lr", "gamma", "seed") if len({other[key] for other in alike}) > 1]
        return [f"{key} {line[key]:g}" for key in differ]

    return [", ".join([runs.label(line["name"]), f"$d={line['depth']}$", *differences(line)]) for line in rows]


def draw(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> Figure:
    from shaped.figures.harness.style import BLACK, BLUE, make_panels

    names = list(dict.fromkeys(arrays["name"]))
    figure, panels = make_panels(3, height=1.2 + 0.28 * len(names), sharey=True)
    for axes, task in zip(panels, TASKS, strict=True):
        here = arrays["task"] == task
        at = np.array([len(names) - 1 - names.index(name) for name in arrays["name"][here]])
        spread = np.nan_to_num(arrays["std"][here])
        axes.errorbar(arrays["mean"][here], at, xerr=spread, fmt="o", color=BLUE, markersize=4, capsize=2, label="measured")
        axes.plot(arrays["paper"][here], at, "x", color=BLACK, markersize=5, label="paper")
        axes.set(title={"cola": "CoLA", "mrpc": "MRPC", "rte": "RTE"}[task], ylim=(-0.6, len(names) - 0.4))
        axes.set_xlabel({"cola": "Matthews correlation", "mrpc": "F1", "rte": "accuracy"}[task])
    panels[0].set(yticks=range(len(names)), yticklabels=names[::-1])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return figure


def describe(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    papers = ["no paper's" if np.isnan(score) else f"paper {score:.3g}" for score in arrays["paper"]]
    rows = zip(arrays["task"], arrays["name"], arrays["mean"], papers, strict=True)
    scores = "; ".join(f"{task}, {str(name).replace('$', '')}: {mean:.3g}, {paper}" for task, name, mean, paper in rows)
    return f"Dots with bars for each model in three panels, crosses for the paper. {scores}."
