"""What the pages that read finished training runs share: which files they read, and that these decide whether a page is made anew."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {"recover": "Recover", "learn": "Learn", "fixed": "Fixed", "preln": "Pre-LN", "postln": "Post-LN", "vanilla": "vanilla"}


@dataclass(frozen=True)
class Settings:
    """The runs, by folder and by the hash of what is read of them."""

    runs: tuple[str, ...]
    sha256: str


def settings(runs: tuple[Path, ...], *patterns: str) -> Settings:
    """For the files of these names in the folders and in the folders in them."""
    files = sorted({path for run in runs for pattern in patterns for where in ("", "*/") for path in run.glob(where + pattern)})
    if not files:
        given = ", ".join(map(str, runs)) or "none"
        raise ValueError(f"runs must be folders of finished runs of `shaped pretrain`, with {' and '.join(patterns)}, got {given}")
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return Settings(tuple(map(str, runs)), digest.hexdigest())


def folders(settings: Settings) -> Iterable[Path]:
    return [Path(run) for run in settings.runs]


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
