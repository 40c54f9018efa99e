"""`shaped study`: a queue of runs from one TOML file, one after another in one process, within a time limit.

Runs of the same shapes share one compiled step. A queue that ran out of time goes on where it stopped when it is called again.

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

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from shaped.checks import positive
from shaped.train.collection import collect, from_folder
from shaped.train.pretrain import Diverged, Steppers, Stopped, pretrain
from shaped.train.settings import Settings, read_toml
from shaped.train.stepper import Say


def plan(path: Path, **overrides: Any) -> tuple[dict[str, Settings], float | None, Path]:
    """The runs of a file by name, their time in minutes, and their folder."""
    file = read_toml(path) | {name: value for name, value in overrides.items() if value is not None}
    for name in file:
        if name not in ("out", "minutes", "defaults", "run", "data"):
            raise ValueError(f"a study must have out, minutes, defaults and run, got {name} in {path}")
    if not file.get("run") or "out" not in file:
        raise ValueError(f"a study must have out and at least one [[run]], got {', '.join(file) or 'nothing'} in {path}")
    out = Path(file["out"])
    minutes = None if file.get("minutes") is None else positive("minutes", file["minutes"])
    defaults = file.get("defaults", {}) | ({"data": file["data"]} if "data" in file else {})
    runs: dict[str, Settings] = {}
    for entry in file["run"]:
        given = defaults | entry
        name = given.pop("name", given.get("model", "run"))
        lists = {key: value for key, value in given.items() if isinstance(value, list)}
        for values in product(*lists.values()):
            chosen = dict(zip(lists, values, strict=True))
            label = "-".join([name, *(f"{key}{value:g}" if isinstance(value, float) else f"{key}{value}" for key, value in chosen.items())])
            if label in runs:
                raise ValueError(f"names of runs must differ, got {label} twice in {path}")
            runs[label] = Settings.of(given | chosen | {"out": out / label})
    return runs, minutes, out


def study(path: Path, *, only: Sequence[str] = (), say: Say = print, progress: bool = False, **overrides: Any) -> dict[str, Any]:
    """Does the runs that are not done yet, or those of them named in `only`, and writes `study.json` (results) and `study.jsonl` (all
    metrics) after each of them. Several processes may share a study, each with runs of its own."""
    runs, minutes, out = plan(path, **overrides)
    for name in only:
        if name not in runs:
            raise ValueError(f"only must be among {', '.join(runs)}, got {name}")
    began, steppers = time.monotonic(), Steppers()
    diverged: dict[str, str] = {}
    for name, settings in runs.items():
        if only and name not in only:
            continue
        left = None if minutes is None else minutes - (time.monotonic() - began) / 60
        if left is not None and left <= 0:
            say(f"{minutes:g} minutes are over before {name}; the same command goes on")
            break
        started = time.monotonic()
        try:
            result = pretrain(replace(settings, minutes=left), say=say, progress=progress, steppers=steppers)
            took = time.monotonic() - started
            say(f"{name}: train {result.train_loss:.4f}, test {result.test_loss:.4f} ({result.steps} steps, {took:.0f} s)")
        except Diverged as error:
            diverged[name] = str(error)
            say(f"{name}: {error}")
        except Stopped as error:
            say(f"{name}: {error}")
            break
        report(runs, diverged, out)
    return report(runs, diverged, out)


def report(runs: dict[str, Settings], diverged: dict[str, str], out: Path) -> dict[str, Any]:
    found = [from_folder(settings.out, settings, diverged.get(name, "")) for name, settings in runs.items()]
    return collect(found, out / "study.json")
