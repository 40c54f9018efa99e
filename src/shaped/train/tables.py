"""The rows and curves of the paper's tables and its entropy figure, from training runs."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from shaped.train.collection import Trained
from shaped.train.results import Result
from shaped.train.settings import Settings

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


TASK = ("heads", "hidden", "batch", "mask_share")
"""Beside depth, width, steps and data, what must be the same for two losses to be compared."""
CHOSEN = ("tau0", "gamma_feedforward", "c_minus", "train_gains", "recover_steps", "embedding_norm", "embedding_std", "head_std", "tied")
CHOSEN += ("warmup", "decay", "gain_lr", "shaping_lr", "embedding_lr", "head_lr", "clip")
"""What is tried to find the best. The rest of the settings (logs, devices, checkpoints) changes no result beyond rounding."""

OF_SHAPED = ("gamma", "gamma_feedforward", "tau0", "c_minus", "train_gains", "recover_steps", "gain_lr", "shaping_lr")
"""Those of them that other models than the shaped one do not have."""
DEFAULTS = {about.name: about.default for about in fields(Settings)}


def table1(results: Iterable[Result]) -> list[dict[str, Any]]:
    """For each schedule and depth, the settings with the least mean test loss, over seeds; the paper's beside it.

    Of runs with the same settings and the same seed the last counts.
    """
    groups: dict[tuple[str, int, int, str], dict[str, dict[int, Result]]] = defaultdict(lambda: defaultdict(dict))
    for result in results:
        task = _chosen(result.settings, TASK) | {"width": result.width, "data": result.data}
        recipe = json.dumps({"lr": result.lr} | _recipe(result.settings | {"gamma": result.gamma}, result.model))
        groups[result.name, result.depth, result.steps, json.dumps(task, sort_keys=True)][recipe][result.seed] = result
    rows = []
    for (name, depth, steps, task), tried in sorted(groups.items()):
        best = min(([*seeds.values()] for seeds in tried.values()), key=lambda found: statistics.fmean(run.test_loss for run in found))
        train, test = ([getattr(run, kind) for run in best] for kind in ("train_loss", "test_loss"))
        paper, recipe = PAPER_TABLE1.get((name, depth)), _recipe(best[0].settings | {"gamma": best[0].gamma}, best[0].model)
        rows.append(
            {"name": name, "depth": depth, "steps": steps, "lr": best[0].lr, "gamma": recipe.get("gamma"), "tau0": recipe.get("tau0")}
            | {"seeds": len(best), "tried": len(tried), "task": task}
            | {"train_loss": statistics.fmean(train), "test_loss": statistics.fmean(test), "test_loss_std": spread(test)}
            | {"paper": None if paper is None else paper[0], "paper_std": None if paper is None else paper[1]}
        )
    return rows


def table2(runs: Iterable[Trained]) -> list[dict[str, Any]]:
    """The GLUE scores of finished runs, with the paper's."""
    rows = []
    for run in runs:
        if run.result is None:
            continue
        for task, scores in sorted(run.glue.items()):
            score = scores["score"]
            rows.append(
                {name: getattr(run.result, name) for name in ("name", "depth", "steps", "lr", "gamma", "seed")}
                | {"task": task, "score": score, "mean": scores[score]["mean"], "std": scores[score]["std"], "seeds": len(scores["seeds"])}
                | {"paper": PAPER_TABLE2.get((run.kind, run.result.depth), {}).get(task)}
            )
    return rows


def entropy_curves(runs: Iterable[Trained], layers: tuple[int, ...] = (1, 7)) -> list[dict[str, Any]]:
    """fig6: the entropy of some layers (counted from 1) against steps, for every run, finished or not.

    "recipe" is the same for runs that differ in their learning rate and seed alone.
    """
    curves = []
    for run in runs:
        seen, settings = [line for line in run.metrics if line["kind"] == "layers"], run.settings
        recipe = json.dumps(_recipe(settings, settings["model"]))
        curves += [
            {"name": run.kind, "recipe": recipe, "layer": layer, "diverged": bool(run.why)}
            | {name: settings[name] for name in ("lr", "gamma", "seed", "depth")}
            | {"steps": [line["step"] for line in seen], "entropy": [line["entropy"][layer - 1] for line in seen]}
            for layer in layers
            if seen and layer <= settings["depth"]
        ]
    return curves


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


def _recipe(settings: dict[str, Any], model: str) -> dict[str, Any]:
    """What is chosen for a model, but its learning rate."""
    return _chosen(settings, [name for name in ("gamma", *CHOSEN) if model == "shaped" or name not in OF_SHAPED])


def _chosen(settings: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """A run from before a setting existed had what is its default now."""
    return {name: settings.get(name, DEFAULTS[name]) for name in names}
