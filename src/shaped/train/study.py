"""`shaped study`: a queue of runs from one TOML file, one after another in one process, within a time limit.

Runs of the same shapes share one compiled step. A queue that ran out of time goes on where it stopped when it is called again. A run that
diverged is not tried again with the same settings; one that failed for another reason is, and does not stop the others.

    out = "runs/lr"          # a folder a run
    minutes = 9.0            # for all of them; optional
    [defaults]               # settings of `shaped pretrain`
    data = "data"
    [[run]]
    name = "recover"
    lr = [1e-4, 5e-4]        # a list: one run for each entry
    seed = [0, 1]            # several lists: one for each combination
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from shaped.checks import positive
from shaped.files import check_writable
from shaped.process import quote_error
from shaped.train.folder_lock import Busy, file_lock
from shaped.train.run.folder import read_divergence
from shaped.train.run.loop import pretrain
from shaped.train.run.settings import Settings, read_toml
from shaped.train.run.stopping import Alarmed, Diverged, Stopped
from shaped.train.run_records import RunRecord, collect, read_folder
from shaped.train.step.stepper import Log
from shaped.train.step.stepper_cache import StepperCache

MOST_RUNS = 10_000
LOCK = ".study.lock"
OWN = ("study.json", "study.jsonl", LOCK)  # what a study writes into the folder of its runs


def read_study(path: Path, **overrides: Any) -> tuple[dict[str, Settings], float | None, Path]:
    """The runs of a file by name, their time in minutes, and their folder."""
    file = read_toml(path, "file") | {name: value for name, value in overrides.items() if value is not None}
    for name in file:
        if name not in ("out", "minutes", "defaults", "run", "data"):
            raise ValueError(f"a study must have out, minutes, defaults and run, got {name} in {path}")
    if not file.get("run") or "out" not in file:
        raise ValueError(f"a study must have out and at least one [[run]], got {', '.join(file) or 'nothing'} in {path}")
    for name, kind, wanted in (("out", str, "a path"), ("data", str, "a path"), ("defaults", dict, "a table"), ("run", list, "tables")):
        if not isinstance(file.get(name, kind()), kind):
            raise ValueError(f"{name} must be {wanted}, got {file[name]!r} in {path}")
    out = Path(file["out"])
    minutes = None if file.get("minutes") is None else positive("minutes", file["minutes"])
    defaults = file.get("defaults", {}) | ({"data": file["data"]} if "data" in file else {})
    runs: dict[str, Settings] = {}
    for entry in file["run"]:
        if not isinstance(entry, dict):
            raise ValueError(f"run must be tables, [[run]], got {entry!r} in {path}")
        given = defaults | entry
        for name in ("out", "minutes"):
            if name in given:
                raise ValueError(f"{name} must stand at the top of a study, for all its runs, got {given[name]!r} in a table of {path}")
        name = given.pop("name", given.get("model", "run"))
        lists = {key: value for key, value in given.items() if isinstance(value, list)}
        for key, values in lists.items():
            if not values:
                raise ValueError(f"{key} must be a value or a list of at least one, got [] for {name} in {path}")
        if math.prod(map(len, lists.values())) + len(runs) > MOST_RUNS:
            raise ValueError(f"a study must have at most {MOST_RUNS} runs, got {math.prod(map(len, lists.values()))} of {name} in {path}")
        for values in product(*lists.values()):
            chosen = dict(zip(lists, values, strict=True))
            parts = [f"{key}{value:g}" if isinstance(value, float) else f"{key}{value}" for key, value in chosen.items()]
            label = "-".join([str(name), *parts])
            if label in ("", ".", "..", *OWN) or any(sign in label for sign in "/\\\0"):
                raise ValueError(f"names of runs must be names of folders, not {' or '.join(OWN)}, got {label!r} in {path}")
            if label in runs:
                raise ValueError(f"names of runs must differ, got {label} twice in {path}")
            runs[label] = Settings.of(given | chosen | {"out": out / label})
    return runs, minutes, out


def study(path: Path, *, only: Sequence[str] = (), log: Log = print, progress: bool = False, **overrides: Any) -> dict[str, Any]:
    """Does the runs that are not done yet, or those of them named in `only`, and writes `study.json` (results) and `study.jsonl` (all
    metrics) after each of them. Several processes may share a study: each skips the runs that another one works on.

    Returns the content of `study.json`: `unfinished` has the reason (`why`) of a run that diverged; `failed` has other errors by name.
    """
    runs, minutes, out = read_study(path, **overrides)
    for name in only:
        if name not in runs:
            raise ValueError(f"only must be among {', '.join(runs)}, got {name}")
    check_writable(out, files=OWN)
    began, steppers = time.monotonic(), StepperCache()
    failed: dict[str, str] = {}
    busy: set[str] = set()
    for name, settings in runs.items():
        if only and name not in only:
            continue
        left = None if minutes is None else minutes - (time.monotonic() - began) / 60
        started = time.monotonic()
        try:
            if why := read_divergence(settings):
                log(f"{name}: not tried again (delete {settings.out / 'diverged.json'} for that): {why}")
                continue
            if left is not None and left <= 0:
                log(f"{minutes:g} minutes are over before {name}; the same command goes on")
                break
            result = pretrain(replace(settings, minutes=left), log=log, progress=progress, steppers=steppers)
            took = time.monotonic() - started
            log(f"{name}: train {result.train_loss:.4f}, test {result.test_loss:.4f} ({result.steps} steps, {took:.0f} s)")
        except (Alarmed, Diverged, Busy) as error:  # the others go on
            log(f"{name}: {error}")
            busy |= {name} if isinstance(error, Busy) else set()
        except Stopped as error:
            log(f"{name}: {error}")
            break
        except Exception as error:  # of this run: the others may have none
            failed[name] = describe_error(error)
            log(f"{name}: {failed[name]}")
        if name in failed:  # only here: the error, now deleted, kept the run's tensors in memory
            steppers.clear()
            gc.collect()
            torch.cuda.empty_cache()
        write_report(runs, failed, busy, out)
    summary = write_report(runs, failed, busy, out)
    for name, why in summary["failed"].items():
        if name not in failed:
            log(f"{name}: {why}")
    return summary


def write_report(runs: dict[str, Settings], failed: dict[str, str], busy: set[str], out: Path) -> dict[str, Any]:
    """Writes the records of all runs. A folder that cannot be read is a failure, unless another process works in it."""
    unreadable: dict[str, str] = {}
    with file_lock(out / LOCK):  # processes that share the study write two files, and the last one to write has read the newest records
        left = [read_run(name, settings, unreadable) for name, settings in runs.items()]
        every = {name: why for name, why in unreadable.items() if name not in busy} | failed
        return collect(left, out / "study.json", failed={name: every[name] for name in runs if name in every})


def read_run(name: str, settings: Settings, unreadable: dict[str, str]) -> RunRecord:
    """The record of a run. Its settings alone, if its folder cannot be read or holds a run that diverged with other settings."""
    try:
        found = read_folder(settings.out, settings)
        if bool(found.why) == bool(read_divergence(settings)):
            return found
    except ValueError as error:
        unreadable[name] = describe_error(error)
    return RunRecord(name, settings.record())


def describe_error(error: Exception) -> str:
    """One line. The type precedes the text of unexpected errors (not a ValueError)."""
    text = quote_error(error, 300)
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
