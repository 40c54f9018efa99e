"""What the pages that read finished training runs share: which files they read, and that these decide whether a page is made anew."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shaped.figures.harness.jobs import NoData
from shaped.train.run_records import RunRecord, read_runs

NAMES = {"recover": "Recover", "learn": "Learn", "fixed": "Fixed", "preln": "Pre-LN", "postln": "Post-LN", "vanilla": "vanilla"}


@dataclass(frozen=True)
class Settings:
    """The runs, by folder or file and by the hash of what is in them."""

    runs: tuple[str, ...]
    sha256: str


def settings(places: tuple[Path, ...]) -> Settings:
    digest = hashlib.sha256()
    for run in read_runs(places):
        digest.update(json.dumps(asdict(run), sort_keys=True).encode())
    return Settings(tuple(map(str, places)), digest.hexdigest())


def read(settings: Settings, what: str, having: Callable[[RunRecord], Any]) -> list[RunRecord]:
    """The runs that have what a page needs; at least one."""
    found = [run for run in read_runs([Path(run) for run in settings.runs]) if having(run)]
    if not found:
        raise NoData(f"runs must have {what}, got none in {', '.join(settings.runs) or 'no folder or file'}")
    return found


def table(rows: list[dict[str, Any]], columns: dict[str, str]) -> dict[str, Any]:
    """The rows for the report: by the columns' headings, with models by their names and nothing where a number is missing."""

    def cell(name: str, value: Any) -> Any:
        if name == "name":
            return label(value)
        return None if isinstance(value, float) and math.isnan(value) else value

    return {"columns": list(columns.values()), "rows": [[cell(name, line[name]) for name in columns] for line in rows]}


def numbers(rows: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([math.nan if line[name] is None else line[name] for line in rows], dtype=float)


def label(name: str) -> str:
    return NAMES.get(name, name)
