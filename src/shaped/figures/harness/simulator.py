"""Lab: where and how the numbers of a figure are made; Result: what comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from shaped.checks import whole_number
from shaped.engine import scattered
from shaped.figures.harness.claims import Row

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")

CLAIMED_TOKENS = (2, 4, 8)
"""The captions do not give the number of tokens, so every claim is checked for these."""


class NoData(ValueError):
    """The runs that a page reads have nothing of what it shows."""


@dataclass(frozen=True)
class Lab:
    """What is the same for every figure of a run."""

    tokens: int = 4
    seed: int = 0
    device: str = "cpu"
    executor: Executor | None = None
    runs: tuple[Path, ...] = ()
    """Folders of finished training runs."""
    advance: Callable[[int, int], None] | None = None
    """Told after each job how many of how many are done."""

    def __post_init__(self) -> None:
        whole_number("tokens", self.tokens, least=2)
        whole_number("seed", self.seed, least=0, most=math.inf)

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of tokens for which claims are checked: the usual ones and the one that is drawn."""
        return tuple(sorted({*CLAIMED_TOKENS, self.tokens}))

    def share(self, samples: int, m: int) -> int:
        """Samples for m tokens: all where m is drawn, a quarter, but no fewer than 256, where only claims are checked."""
        return samples if m == self.tokens else min(samples, max(256, samples // 4))

    def run(self, jobs: Mapping[K, Callable[[], R]]) -> dict[K, R]:
        """The jobs' results by their keys. Jobs must survive pickling (partials of importable functions) and return numpy arrays."""
        done: dict[K, R] = {}
        keys, works = list(jobs), list(jobs.values())
        results = enumerate(map(call, works)) if self.executor is None else scattered(self.executor, call, works)
        for place, result in results:
            done[keys[place]] = result
            if self.advance is not None:
                self.advance(len(done), len(keys))
        return {key: done[key] for key in keys}


def call(job: Callable[[], R]) -> R:
    return job()


@dataclass(frozen=True)
class Result:
    """Everything a figure is drawn from, and what it shows about the paper's claims."""

    arrays: dict[str, np.ndarray]
    claims: list[Row]
    table: dict[str, Any] = field(default_factory=dict)
    """Optional, for the report: {"columns": [...], "rows": [[...], ...]}, texts and numbers."""
