"""The rows and curves of the paper's tables and its entropy figure, from training runs."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from shaped.train.run.result import Result
from shaped.train.run.settings import PRESETS, Settings
from shaped.train.run_records import Trained

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


OF_GAINS = ("gamma", "gamma_feedforward", "train_gains", "gain_lr")  # of the residual branches: not those of Pre-LN and Post-LN
OF_SHAPING = ("tau0", "c_minus", "recover_steps", "shaping_lr")
OF_RECOVER, OF_LEARN = ("recover_steps",), ("shaping_lr",)
CHOSEN = (
    *OF_GAINS,
    *OF_SHAPING,
    "embedding_norm",
    "embedding_std",
    "head_std",
    "tied",
    "warmup",
    "decay",
    "embedding_lr",
    "head_lr",
    "clip",
)
"""What is tried to find the best, beside the learning rate. The rest of the settings (logs, devices, checkpoints) changes no result beyond
rounding."""
LOSSES = ("train_loss", "test_loss")
DEFAULTS: dict[str, Any] = {about.name: about.default for about in fields(Settings)} | PRESETS["paper"]
"""Of runs that do not say all their settings: they are from when the paper's were the defaults."""


def table1(results: Iterable[Result]) -> list[dict[str, Any]]:
    """For each schedule and depth, the settings with the least mean test loss, over seeds; the paper's beside it.

    Runs with the same settings and the same seed count as one, with their mean.
    """
    groups: dict[tuple[str, int, int, str], dict[str, dict[int, list[Result]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for result in results:
        settings = result.settings | {name: getattr(result, name) for name in ("model", "schedule", "width", "gamma")}
        task = json.dumps(_task(settings) | {"data": result.data}, sort_keys=True)
        recipe = json.dumps({"lr": result.lr} | _recipe(settings))
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


def table2(runs: Iterable[Trained]) -> list[dict[str, Any]]:
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


def entropy_curves(runs: Iterable[Trained], layers: tuple[int, ...] = (1, 7)) -> list[dict[str, Any]]:
    """fig6: the entropy of some layers (counted from 1) against steps, for every run, finished or not.

    "recipe" is the same for runs that differ in their learning rate, steps and seed alone; "planned" are the steps it was to have, and
    "ended" it has if it came to its end, which may be that it diverged.
    """
    curves = []
    for run in runs:
        seen = [line for line in run.metrics if line["kind"] == "layers" and None not in line["entropy"]]
        settings = run.settings
        recipe = json.dumps(_task(settings) | _recipe(settings) | {"depth": settings["depth"]})
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
    return model in ("shaped", "vanilla")


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


def _task(settings: dict[str, Any]) -> dict[str, Any]:
    """Beside depth, steps and text, what must be the same for two losses to be compared."""
    given = DEFAULTS | settings
    return {name: given[name] for name in ("width", "heads", "batch", "mask_share")} | {"hidden": given["hidden"] or 4 * given["width"]}


def _recipe(settings: dict[str, Any]) -> dict[str, Any]:
    """What was chosen for a model, but its learning rate: what it makes use of, as it takes it.

    A run from before a setting existed had what is its default now, or the paper's.
    """
    given, of_shaped = DEFAULTS | settings, settings["model"] == "shaped"
    if given["gamma_feedforward"] is None:
        given["gamma_feedforward"] = given["gamma"]
    unused = () if has_gains(settings["model"]) else OF_GAINS
    unused += () if of_shaped else OF_SHAPING
    unused += () if of_shaped and given["schedule"] == "recover" else OF_RECOVER
    unused += () if of_shaped and given["schedule"] == "learn" else OF_LEARN
    return {name: given[name] for name in CHOSEN if name not in unused}
