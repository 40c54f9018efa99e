"""The rows and curves of the paper's tables and its entropy figure, from training runs."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from shaped.nn.blocks import BLOCKS
from shaped.train.run.result import Result
from shaped.train.run.settings import DEFAULTS, PRESETS, Settings, find_parts
from shaped.train.run_records import RunRecord

PAPER_TABLE1 = {  # test loss at 100K steps, best gamma: mean and standard deviation
    ("recover", 18): (2.03, 0.01),
    ("recover", 24): (2.00, 0.01),
    ("learn", 18): (2.06, 0.02),
    ("learn", 24): (2.02, 0.03),
    ("preln", 18): (2.07, 0.01),
    ("preln", 24): (2.01, 0.01),
}
PAPER_TABLE2 = {  # CoLA, MRPC, RTE: means (their standard deviations are 0.004 to 0.055)
    ("preln", 18): {"cola": 0.139, "mrpc": 0.797, "rte": 0.504},
    ("learn", 18): {"cola": 0.182, "mrpc": 0.813, "rte": 0.528},
    ("recover", 18): {"cola": 0.221, "mrpc": 0.809, "rte": 0.520},
    ("preln", 24): {"cola": 0.022, "mrpc": 0.785, "rte": 0.480},
    ("learn", 24): {"cola": 0.150, "mrpc": 0.812, "rte": 0.513},
    ("recover", 24): {"cola": 0.211, "mrpc": 0.803, "rte": 0.529},
}


TASK = ("width", "heads", "batch", "mask_share")  # beside depth, steps and text, these must agree for two losses to be compared
NAMED = ("model", "schedule", "depth", "hidden", "steps", "lr", "seed", "objective", "borders", "precision", "stream")
CHOSEN = tuple(about for about in fields(Settings) if about.metadata["affects"] == "result" and about.name not in (*TASK, *NAMED))
"""Settings that were tuned, beside the learning rate: those that affect the result and do not identify a task or a run.
Precisions are left out: they only change the rounding."""
LOSSES = ("train_loss", "test_loss")
OLD_DEFAULTS = DEFAULTS | PRESETS["paper"]
"""For runs whose record lacks settings: in their time the paper's values were the defaults."""


def table1(results: Iterable[Result]) -> list[dict[str, Any]]:
    """For each schedule and depth, the settings with the least mean test loss, over seeds; the paper's beside it.

    Runs with the same settings and the same seed count as one, with their mean.
    """
    groups: dict[tuple[str, int, int, str], dict[str, dict[int, list[Result]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for result in results:
        settings = result.settings | {name: getattr(result, name) for name in ("model", "schedule", "width", "gamma")}
        task = json.dumps(_describe_task(settings) | {"data": result.data}, sort_keys=True)
        recipe = json.dumps({"lr": result.lr} | _describe_recipe(settings))
        groups[result.name, result.depth, result.steps, task][recipe][result.seed].append(result)
    rows = []
    for (name, depth, steps, task), tried in sorted(groups.items()):
        losses = {
            recipe: {kind: [statistics.fmean(getattr(run, kind) for run in runs) for runs in seeds.values()] for kind in LOSSES}
            for recipe, seeds in tried.items()
        }
        best = min(losses, key=lambda recipe: statistics.fmean(losses[recipe]["test_loss"]))
        chosen, paper = json.loads(best), PAPER_TABLE1.get((name, depth))
        rows.append(
            {"name": name, "depth": depth, "steps": steps, "lr": chosen["lr"], "gamma": chosen.get("gamma"), "tau0": chosen.get("tau0")}
            | {"seeds": len(tried[best]), "tried": len(tried), "task": task}
            | {kind: statistics.fmean(losses[best][kind]) for kind in LOSSES}
            | {"test_loss_std": spread(losses[best]["test_loss"])}
            | {"paper": None if paper is None else paper[0], "paper_std": None if paper is None else paper[1]}
        )
    return rows


def table2(runs: Iterable[RunRecord]) -> list[dict[str, Any]]:
    """The GLUE scores of finished runs, with the paper's."""
    rows = []
    for run in runs:
        if run.result is None:
            continue
        for task, scores in sorted(run.glue.items()):
            score = scores["score"]
            rows.append(
                {name: getattr(run.result, name) for name in ("name", "depth", "steps", "lr", "seed")}
                | {"gamma": run.result.gamma if has_gains(run.result.model) else None}
                | {"task": task, "score": score, "mean": scores[score]["mean"], "std": scores[score]["std"], "seeds": len(scores["seeds"])}
                | {"paper": PAPER_TABLE2.get((run.kind, run.result.depth), {}).get(task)}
            )
    return rows


def entropy_curves(runs: Iterable[RunRecord], layers: tuple[int, ...] = (1, 7)) -> list[dict[str, Any]]:
    """fig6: the entropy of some layers (counted from 1) against steps, for every run, finished or not.

    Runs with the same "recipe" differ only in learning rate, steps and seed. "planned" is the number of steps in the settings. "ended" is
    true for a finished run and for one that diverged.
    """
    curves = []
    for run in runs:
        seen = [line for line in run.metrics if line["kind"] == "layers" and None not in line["entropy"]]
        settings = run.settings
        recipe = json.dumps(_describe_task(settings) | _describe_recipe(settings) | {"depth": settings["depth"]})
        ended = bool(run.why) or run.result is not None
        curves += [
            {"name": run.kind, "recipe": recipe, "layer": layer, "diverged": bool(run.why), "planned": settings["steps"], "ended": ended}
            | {name: settings[name] for name in ("lr", "gamma", "seed", "depth")}
            | {"steps": [line["step"] for line in seen], "entropy": [line["entropy"][layer - 1] for line in seen]}
            for layer in layers
            if seen and layer <= settings["depth"]
        ]
    return curves


def has_gains(model: str) -> bool:
    """Do its residual branches have lambda and gamma? The vanilla network is the shaped one without its shaping."""
    return "gains" in BLOCKS[model].parts


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


def _describe_task(settings: dict[str, Any]) -> dict[str, Any]:
    """What must be the same for two losses to be compared, beside depth, steps and text."""
    given = OLD_DEFAULTS | settings
    task = {name: given[name] for name in TASK} | {"hidden": given["hidden"] or 4 * given["width"]}
    # Claims have hashes of this text in their ids, and older ones are all of this objective.
    return task if given["objective"] == "masked" else task | {name: given[name] for name in ("objective", "borders")}


def _describe_recipe(settings: dict[str, Any]) -> dict[str, Any]:
    """The tuned settings that a model uses, without its learning rate."""
    given = OLD_DEFAULTS | settings
    if given["gamma_feedforward"] is None:
        given["gamma_feedforward"] = given["gamma"]
    parts = find_parts(given["model"], given["schedule"], given["embedding_norm"]) | {given["positions"]}
    return {about.name: given[about.name] for about in CHOSEN if about.metadata["used_by"] in parts}
