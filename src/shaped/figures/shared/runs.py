"""Finished training runs: shared by the pages that read them. Their hash is part of a page's settings, hence of its key in the cache."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shaped.figures.harness.page import NoData
from shaped.train import run_records
from shaped.train.run_records import RunRecord

NAMES = {"recover": "Recover", "learn": "Learn", "fixed": "Fixed", "preln": "Pre-LN", "postln": "Post-LN", "vanilla": "vanilla"}
ADDED = {"rms": "RMSNorm", "qk": "QK-norm"}
"""What the end of a kind's name says that the paper's models do not have."""


@dataclass(frozen=True)
class Settings:
    """The folders and files of the runs, and a hash of their content."""

    runs: tuple[str, ...]
    sha256: str


def hash_runs(places: tuple[Path, ...]) -> Settings:
    digest = hashlib.sha256()
    for run in run_records.read_runs(places):
        digest.update(json.dumps(asdict(run), sort_keys=True).encode())
    return Settings(tuple(map(str, places)), digest.hexdigest())


def read_runs(settings: Settings, what: str, having: Callable[[RunRecord], Any]) -> list[RunRecord]:
    """The runs of the paper's objective for which `having` is true; NoData, which names `what`, if there is none.

    Losses and entropies of causal models are not comparable with those of masked language models.
    """
    every = run_records.read_runs([Path(run) for run in settings.runs])
    found = [run for run in every if run.objective == "masked" and having(run)]
    if not found:
        places = f"none in {', '.join(settings.runs)}" if settings.runs else "no runs (option --runs)"
        raise NoData(f"runs must have {what}, from masked language modelling, got {places}")
    return found


def make_table(rows: list[dict[str, Any]], columns: dict[str, str]) -> dict[str, Any]:
    """A table for the report: columns by key and heading, models by their printed names, None for a missing number."""

    def cell(name: str, value: Any) -> Any:
        if name == "name":
            return label(value)
        return None if isinstance(value, float) and math.isnan(value) else value

    return {"columns": list(columns.values()), "rows": [[cell(name, line[name]) for name in columns] for line in rows]}


def column(rows: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([math.nan if line[name] is None else line[name] for line in rows], dtype=float)


def label(kind: str) -> str:
    """The printed name of a kind of model: "Pre-LN with RMSNorm and QK-norm" for "preln-rms-qk"."""
    plain, *added = kind.split("-")
    printed = NAMES.get(plain, plain)
    return f"{printed} with {' and '.join(ADDED[one] for one in added)}" if added else printed


def find_plain(kind: str) -> str:
    """The paper's kind of model that this one is a variant of: "preln" for "preln-rms-qk"."""
    return kind.split("-")[0]
