"""A run's folder: whose it is, and what is left in it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shaped.files import read_json, read_text, sha256, write_atomically
from shaped.train.run import checkpoint
from shaped.train.run.result import read_result
from shaped.train.run.settings import Settings

HISTORY = ("settings.toml", "metrics.jsonl")  # what a run leaves beside its model
SEAL = "# sha256 of the lines below: "

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
    before = {"activation": "relu"} | about["settings"]  # a run from before there were others does not say it
    return about["why"] if before == computed(settings) else ""


def write_settings(settings: Settings) -> None:
    """Into the run's folder, with their hash. A copy that is edited by hand is still a file for `--config`."""
    text = settings.to_toml()
    sealed = f"{SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"
    write_atomically(settings.out / "settings.toml", lambda file: file.write(sealed.encode()))


def read_settings(folder: Path) -> Settings:
    """The settings of the run in a folder, as it wrote them."""
    path = folder / "settings.toml"
    first, _, lines = read_text(path).partition("\n")
    if first.startswith(SEAL) and first.removeprefix(SEAL) != hashlib.sha256(lines.encode()).hexdigest():
        raise ValueError(
            f"{path} must be as the run wrote it, got one that was changed since (its first line has the hash): undo the change, or delete "
            "the file and call the same `shaped pretrain` again, which goes on from the last checkpoint; other settings need another out"
        )
    return Settings.from_toml(path)


def claim(settings: Settings) -> None:
    """Is the folder free, or that of a run with the same settings? One that diverged makes room for one with others."""
    if not (settings.out / "settings.toml").exists() or not has_begun(settings.out):
        return
    before = read_settings(settings.out)
    if differing(before, settings) and (settings.out / "diverged.json").exists():
        set_aside(settings.out)
    else:
        refuse_other(before, settings)


def differing(before: Settings, now: Settings) -> list[str]:
    """The settings that may not change when a run goes on, and did."""
    values, others = asdict(before), asdict(now)
    return [name for name in others if name not in FREE and values[name] != others[name]]


def refuse_other(before: Settings, now: Settings) -> None:
    for name in differing(before, now)[:1]:
        raise ValueError(
            f"{name} must be {getattr(before, name)}, as in the run that {now.out} holds, got {getattr(now, name)}: "
            "another out, or delete that folder"
        )


def check_files(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Are the files of a finished run what it wrote? Those that are wanted, of those that its result has hashes of."""
    for name, written in read_result(folder / "result.json")[1].items():
        if not wanted(name):
            continue
        path = folder / name
        try:
            found = sha256(path)
        except FileNotFoundError:
            raise ValueError(f"{path} must be there, since the run wrote it, got none: {MEND}") from None
        if found != written:
            raise ValueError(f"{path} must be as the run wrote it, got another content: {MEND}")


MEND = "without result.json the same `shaped pretrain` makes it again from the last checkpoint"


def has_begun(out: Path) -> bool:
    """Has a run left anything here but its settings? One that failed before its first step has not, and is no reason to refuse another."""
    metrics = out / "metrics.jsonl"
    kept = bool(checkpoint.found(out / "checkpoints")) or (out / "diverged.json").exists()
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
