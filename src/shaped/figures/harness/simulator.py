"""Simulator: runs the simulations of a page, here or on an executor."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shaped.checks import whole_number
from shaped.engine import scatter

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")

CLAIMED_TOKENS = (2, 4, 8)
"""The captions do not give the number of tokens, so every claim is checked for these."""


@dataclass(frozen=True)
class Simulator:
    """The options of one `shaped reproduce`, the same for every page, and where its simulations run."""

    tokens: int = 4
    """The number of tokens that is drawn."""
    seed: int = 0
    device: str = "cpu"
    executor: Executor | None = None
    runs: tuple[Path, ...] = ()
    """Folders of finished training runs."""
    advance: Callable[[int, int], None] | None = None
    """Called after each job with the number of jobs done and the number of all jobs."""

    def __post_init__(self) -> None:
        whole_number("tokens", self.tokens, least=2)
        whole_number("seed", self.seed, least=0, most=math.inf)

    @property
    def token_counts(self) -> tuple[int, ...]:
        """The numbers of tokens for which claims are checked: CLAIMED_TOKENS and the one that is drawn."""
        return tuple(sorted({*CLAIMED_TOKENS, self.tokens}))

    def sample_count(self, samples: int, m: int) -> int:
        """How many samples to take for m tokens: all for the m that is drawn, else a quarter of them, but at least 256."""
        return samples if m == self.tokens else min(samples, max(256, samples // 4))

    def run(self, jobs: Mapping[K, Callable[[], R]]) -> dict[K, R]:
        """The jobs' results by their keys. Jobs must survive pickling (partials of importable functions) and return numpy arrays."""
        done: dict[K, R] = {}
        keys, functions = list(jobs), list(jobs.values())
        results = enumerate(map(call, functions)) if self.executor is None else scatter(self.executor, call, functions)
        for index, result in results:
            done[keys[index]] = result
            if self.advance is not None:
                self.advance(len(done), len(keys))
        return {key: done[key] for key in keys}


def call(job: Callable[[], R]) -> R:
    return job()
