"""Table 2: GLUE scores of finished and fine-tuned runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shaped.figures import runs
from shaped.figures.lab import Lab, Result
from shaped.train.results import table2

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


def settings(scale: str, folders: tuple[Path, ...]) -> runs.Settings:
    return runs.settings(folders, "result.json", "glue-*.json")


def compute(settings: runs.Settings, lab: Lab) -> Result:
    rows = table2(runs.folders(settings))
    if not rows:
        raise ValueError(f"runs must have been fine-tuned by `shaped glue`, got no scores in {', '.join(settings.runs)}")
    numbers = {name: runs.numbers(rows, name) for name in ("mean", "std", "paper")}
    words = {"task": [line["task"] for line in rows], "name": [f"{runs.label(line['name'])}, {line['depth']}" for line in rows]}
    return Result(numbers | {name: np.array(texts) for name, texts in words.items()}, [], runs.table(rows, COLUMNS))


def draw(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> Figure:
    from shaped.figures.style import BLACK, BLUE, sheet

    names = list(dict.fromkeys(arrays["name"]))
    figure, panels = sheet(3, height=0.9 + 0.28 * len(names), sharey=True)
    for axes, task in zip(panels, TASKS, strict=True):
        here = arrays["task"] == task
        at = np.array([len(names) - 1 - names.index(name) for name in arrays["name"][here]])
        spread = np.nan_to_num(arrays["std"][here])
        axes.errorbar(arrays["mean"][here], at, xerr=spread, fmt="o", color=BLUE, markersize=4, capsize=2, label="measured")
        axes.plot(arrays["paper"][here], at, "x", color=BLACK, markersize=5, label="paper")
        axes.set(title={"cola": "CoLA", "mrpc": "MRPC", "rte": "RTE"}[task], ylim=(-0.6, len(names) - 0.4))
        axes.set_xlabel({"cola": "Matthews correlation", "mrpc": "F1", "rte": "accuracy"}[task])
    panels[0].set(yticks=range(len(names)), yticklabels=names[::-1])
    panels[-1].legend(loc="best")
    return figure
