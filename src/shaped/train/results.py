"""What finished runs say: results for docs/results, and the rows and curves of the paper's tables and its entropy figure."""

from __future__ import annotations

import json
import math
import os
import shlex
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from shaped.files import write_json
from shaped.train.metrics import read
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
CHOSEN += ("warmup", "decay", "gain_lr", "embedding_lr", "head_lr", "clip")
"""What is tried to find the best. The rest of the settings (logs, devices, checkpoints) changes no result beyond rounding."""


@dataclass(frozen=True)
class Result:
    """A finished run in one row."""

    model: str
    schedule: str
    depth: int
    width: int
    steps: int
    lr: float
    gamma: float
    seed: int
    train_loss: float
    test_loss: float
    command: str
    commit: str
    settings: dict[str, Any] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    device: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> Result:
        try:
            return cls(**json.loads(path.read_text()))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} must be the result of a run of `shaped pretrain`, got something else: {error}") from None

    @property
    def name(self) -> str:
        """What the paper's tables call it: the schedule, or the kind of block of a baseline."""
        return self.schedule if self.model == "shaped" else self.model


def commit() -> str:
    """What SHAPED_COMMIT says, for code that came without its history, or else the checkout's."""
    if stated := os.environ.get("SHAPED_COMMIT"):
        return stated
    try:
        asked = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command_line(settings: Settings) -> str:
    """The command that makes this run: what differs from the defaults. Folders by their last name."""
    words = ["shaped", "pretrain"]
    for about in fields(settings):
        value = getattr(settings, about.name)
        if about.name == "minutes" or (about.default is not MISSING and value == about.default):
            continue
        option = about.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", value.name if isinstance(value, Path) else str(value)]
    return shlex.join(words)


def finished(folders: Iterable[Path]) -> dict[Path, Result]:
    """The finished runs among folders and the folders in them."""
    found = {}
    for folder in folders:
        for path in sorted({folder / "result.json", *folder.glob("*/result.json")}):
            if path.exists():
                found[path.parent] = Result.read(path)
    return found


def collect(folders: Iterable[Path], out: Path) -> dict[str, Any]:
    """All finished runs in one file, as docs/results keeps them."""
    runs = {"runs": [result.to_dict() for result in finished(folders).values()]}
    write_json(out, runs)
    return runs


def table1(results: Iterable[Result]) -> list[dict[str, Any]]:
    """For each schedule and depth, the settings with the least mean test loss, over seeds; the paper's beside it."""
    groups: dict[tuple[str, int, int, str], dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        task = {name: result.settings.get(name) for name in TASK} | {"width": result.width, "data": result.data}
        chosen = {"lr": result.lr, "gamma": result.gamma} | {name: result.settings.get(name) for name in CHOSEN}
        groups[result.name, result.depth, result.steps, json.dumps(task, sort_keys=True)][json.dumps(chosen)].append(result)
    rows = []
    for (name, depth, steps, task), tried in sorted(groups.items()):
        best = min(tried.values(), key=lambda found: statistics.fmean(run.test_loss for run in found))
        lr, gamma, tau0 = best[0].lr, best[0].gamma, best[0].settings.get("tau0")
        train, test = ([getattr(run, kind) for run in best] for kind in ("train_loss", "test_loss"))
        paper = PAPER_TABLE1.get((name, depth))
        rows.append(
            {
                "name": name,
                "depth": depth,
                "steps": steps,
                "lr": lr,
                "gamma": gamma,
                "tau0": tau0,
                "seeds": len(best),
                "tried": len(tried),
                "task": task,
            }
            | {"train_loss": statistics.fmean(train), "test_loss": statistics.fmean(test), "test_loss_std": spread(test)}
            | {"paper": None if paper is None else paper[0], "paper_std": None if paper is None else paper[1]}
        )
    return rows


def table2(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """The GLUE scores of finished runs (glue-TASK.json beside them), with the paper's."""
    rows = []
    for folder, result in finished(folders).items():
        for path in sorted(folder.glob("glue-*.json")):
            scores = json.loads(path.read_text())
            task, score = scores["task"], scores["score"]
            paper = PAPER_TABLE2.get((result.name, result.depth), {}).get(task)
            rows.append(
                {"name": result.name, "depth": result.depth, "steps": result.steps, "lr": result.lr, "gamma": result.gamma, "task": task}
                | {
                    "score": score,
                    "mean": scores[score]["mean"],
                    "std": scores[score]["std"],
                    "seeds": len(scores["seeds"]),
                    "paper": paper,
                }
            )
    return rows


def entropy_curves(folders: Iterable[Path], layers: tuple[int, ...] = (1, 7)) -> list[dict[str, Any]]:
    """fig6: the entropy of some layers (counted from 1) against steps, for every finished or unfinished run."""
    curves = []
    for folder in folders:
        for path in sorted({folder / "metrics.jsonl", *folder.glob("*/metrics.jsonl")}):
            seen = read(path, "layers")
            if seen:
                settings = Settings.from_toml(path.parent / "settings.toml")
                name = settings.schedule if settings.model == "shaped" else settings.model
                curves += [
                    {
                        "name": name,
                        "lr": settings.lr,
                        "gamma": settings.gamma,
                        "seed": settings.seed,
                        "depth": settings.depth,
                        "layer": layer,
                    }
                    | {"steps": [line["step"] for line in seen], "entropy": [line["entropy"][layer - 1] for line in seen]}
                    for layer in layers
                    if layer <= settings.depth
                ]
    return curves


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan
