"""A run's folder: which run it belongs to, and whether its files are intact."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shaped.files import read_json, read_text, sha256, write_atomically
from shaped.train.run import checkpoint
from shaped.train.run.result import read_result
from shaped.train.run.settings import DEFAULTS, Settings

HISTORY = ("settings.toml", "metrics.jsonl")  # what a run leaves beside its model
SEAL = "# sha256 of the lines below: "

# What a diverged run leaves. An interrupted move can go on: settings.toml and diverged.json, which say that it may, are the last ones.
LEFT = ("metrics.jsonl", "checkpoints", "tensorboard", "settings.toml", "diverged.json")


def record_settings(settings: Settings) -> dict[str, Any]:
    """The settings that identify a diverged run: those that affect the computation, including its rounding."""
    return settings.select_affecting("result", "speed")


def read_divergence(settings: Settings) -> str:
    """Why the run in this folder diverged with the same settings; empty if it did not."""
    path = settings.out / "diverged.json"
    if (settings.out / "result.json").exists() or not path.exists():
        return ""
    about = read_json(path, why=str, settings=dict)
    wanted = record_settings(settings)
    before = {name: DEFAULTS[name] for name in wanted} | about["settings"]  # older ones lack newer settings, which had their default then
    return about["why"] if before == wanted else ""


def write_toml(settings: Settings) -> str:
    """The settings that a run keeps: all but the time limit, which is that of one command."""
    return replace(settings, minutes=None).to_toml()


def write_settings(settings: Settings) -> None:
    """Into the run's folder, with their hash. A copy that is edited by hand is still a file for `--config`."""
    text = write_toml(settings)
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


def claim_folder(settings: Settings) -> None:
    """Refuses a folder that holds a run with other settings. What a diverged run left there is archived to make room."""
    if not (settings.out / "settings.toml").exists() or not has_begun(settings.out):
        return
    before = read_settings(settings.out)
    if find_differences(before, settings) and (settings.out / "diverged.json").exists():
        archive_diverged_run(settings.out)
    else:
        refuse_other_settings(before, settings)


def find_differences(before: Settings, now: Settings) -> list[str]:
    """The names of settings that must not change when a run goes on, but did."""
    old = before.select_affecting("result")
    return [name for name, value in now.select_affecting("result").items() if old[name] != value]


def refuse_other_settings(before: Settings, now: Settings) -> None:
    for name in find_differences(before, now)[:1]:
        raise ValueError(
            f"{name} must be {before.select_affecting('result')[name]}, as in the run that {now.out} holds, "
            f"got {now.select_affecting('result')[name]}: "
            "another out, or delete that folder"
        )


def check_files(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Compares the files of a finished run with the hashes in its result; only those whose names are `wanted`."""
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
    """Has a run left more here than its settings? One that failed before its first step has not, and blocks no other."""
    metrics = out / "metrics.jsonl"
    kept = bool(checkpoint.list_checkpoints(out / "checkpoints")) or (out / "diverged.json").exists()
    return kept or (metrics.exists() and metrics.stat().st_size > 0)


def archive_diverged_run(out: Path) -> None:
    """Moves what a diverged run left into a new subfolder, diverged-1, -2 and so on."""
    place = next(path for number in itertools.count(1) if not (path := out / f"diverged-{number}").exists())
    place.mkdir()
    for name in LEFT:
        if (out / name).exists():
            (out / name).rename(place / name)


def check_run_folder(path: Path) -> Path:
    """A finished run with its model, or an error that says what is missing."""
    for name in ("result.json", "config.json"):
        if not (path / name).exists():
            raise ValueError(f"run must be a finished run of `shaped pretrain`, got {path}, which has no {name}")
    return path
