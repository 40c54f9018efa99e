"""A run's folder: whose it is, and what is left in it."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shaped.files import read_json
from shaped.train.settings import Settings

WATCHING = ("out", "data", "minutes", "keep", "tensorboard", "log_every", "evaluate_every", "observe_every", "checkpoint_every")
WATCHING += ("test_rows", "save_model")  # settings that change nothing of what is computed
FREE = (*WATCHING, "device", "compile", "graph", "attention")  # what may change when a run goes on
LEFT = ("settings.toml", "metrics.jsonl", "checkpoints", "tensorboard", "diverged.json")  # what a run that diverged leaves


def computed(settings: Settings) -> dict[str, Any]:
    """The settings that what is computed depends on."""
    return {name: value for name, value in asdict(settings).items() if name not in WATCHING}


def why_diverged(settings: Settings) -> str:
    """What was said when the run in this folder diverged with these very settings; nothing if it did not."""
    path = settings.out / "diverged.json"
    if (settings.out / "result.json").exists() or not path.exists():
        return ""
    about = read_json(path, why=str, settings=dict)
    return about["why"] if about["settings"] == computed(settings) else ""


def claim(settings: Settings) -> None:
    """Is the folder free, or that of a run with the same settings? One that diverged makes room for one with others."""
    path = settings.out / "settings.toml"
    if not path.exists() or not has_begun(settings.out):
        return
    before, now = asdict(Settings.from_toml(path)), asdict(settings)
    differing = [name for name in now if name not in FREE and before[name] != now[name]]
    if differing and (settings.out / "diverged.json").exists():
        set_aside(settings.out)
    elif differing:
        name = differing[0]
        raise ValueError(
            f"{name} must be {before[name]}, as in the run that {settings.out} holds, got {now[name]}: another out, or delete that folder"
        )


def has_begun(out: Path) -> bool:
    """Has a run left anything here but its settings? One that failed before its first step has not, and is no reason to refuse another."""
    metrics = out / "metrics.jsonl"
    kept = any((out / "checkpoints").glob("step-*")) or (out / "diverged.json").exists()
    return kept or (metrics.exists() and metrics.stat().st_size > 0)


def set_aside(out: Path) -> None:
    """Moves what a run that diverged left into a folder of its own."""
    place = next(path for number in itertools.count(1) if not (path := out / f"diverged-{number}").exists())
    place.mkdir()
    for name in LEFT:  # diverged.json, which says that this may be done, last
        if (out / name).exists():
            (out / name).rename(place / name)


def run_folder(path: Path) -> Path:
    """A finished run with its model, or an error that says what is missing."""
    for name in ("result.json", "config.json"):
        if not (path / name).exists():
            raise ValueError(f"run must be a finished run of `shaped pretrain`, got {path}, which has no {name}")
    return path
