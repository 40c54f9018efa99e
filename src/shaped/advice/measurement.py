"""Ledger: networks and paths of the limit, simulated in rounds and counted, at points of a grid of gamma and tau0."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shaped.advice.question import COMPARED, Judged, Question, median, squared_error
from shaped.advice.rows import GradientSpread, Row
from shaped.finite import propagate
from shaped.gradients import backpropagate
from shaped.intervals import median_interval
from shaped.layers import Layer
from shaped.limit import solve
from shaped.trajectory import Trajectory

LAWS = ("network", "limit", *COMPARED)
STAGES = ("search", "proof", "refutation", "gradients")
FIRST_ROUND = 8
"""Samples after which a proof or a refutation looks for the first time whether it failed already. Rounds double."""
ROUND_MEMORY = 2**28
"""Bytes of the covariances that are simulated in one call."""
GRADIENT_NETWORKS = 8
GRADIENT_TOKENS = 32
"""At width 512 and depth 96 a network takes 0.9 s with 32 tokens and 4.2 s with 128, for seven rows of eight networks."""


@dataclass(frozen=True)
class Place:
    law: str
    gamma: float
    tau0: float


@dataclass
class Record:
    """What was simulated at a place for one purpose."""

    stage: str
    failed: list[Tensor] = field(default_factory=list)
    """For each sample: aligned, exploded."""
    correlation: list[Tensor] = field(default_factory=list)
    growth: list[Tensor] = field(default_factory=list)

    def add(self, judged: Judged, enough: int | None) -> None:
        """Adds samples, up to the one that makes `enough` failures. Those after it would make the interval wrong."""
        failures = sum(self.failures) + judged.failed.any(-1).cumsum(0)
        keep = len(failures) if enough is None else int((failures < enough).sum()) + 1
        self.failed.append(judged.failed[:keep])
        self.correlation.append(judged.correlation[:keep])
        self.growth.append(judged.growth[:keep])

    @property
    def count(self) -> int:
        return sum(map(len, self.growth))

    @property
    def failures(self) -> tuple[int, int]:
        """How many aligned and how many exploded."""
        return sum(int(part[:, 0].sum()) for part in self.failed), sum(int(part[:, 1].sum()) for part in self.failed)


class Ledger:
    """Simulates, and keeps what was found. A round's seed depends on its place, its stage and the number of samples before it."""

    def __init__(
        self,
        question: Question,
        seed: int,
        device: str | torch.device = "cpu",
        executor: Executor | None = None,
        progress: bool | None = None,
        tell: Callable[[Row], None] | None = None,
    ):
        self.question, self.seed, self.tell = question, seed, tell
        self.options: dict[str, Any] = {"device": device, "executor": executor, "progress": progress, "dtype": torch.float32}
        self.records: dict[Place, Record] = {}
        self.gradients: dict[Place, GradientSpread | None] = {}

    def search(self, place: Place, count: int) -> Row:
        """What is known of this place; if nothing is, from so many samples."""
        return self.row(place) if place in self.records else self.draw(place, "search", count)

    def draw(self, place: Place, stage: str, count: int, enough: int | None = None) -> Row:
        """Simulates so many fresh samples, or fewer if `enough` of them fail before. They replace what was known of this place.

        Both ends of the exact interval hold for such a sample. They would not if it also ended at a success.
        """
        record = self.records[place] = Record(stage)
        most = max(1, ROUND_MEMORY // (4 * self.question.m**2))
        while record.count < count and (enough is None or sum(record.failures) < enough):
            size = count if enough is None else max(FIRST_ROUND, record.count)
            size = min(size, most, count - record.count)
            paths = self.simulate(place, size, self.choose_seed(place, stage, record.count))
            record.add(self.question.judge(paths, may_grow=place.law == "Pre-LN"), enough)
        row = self.row(place)
        if self.tell is not None:
            self.tell(row)
        return row

    def simulate(self, place: Place, samples: int, seed: int) -> Trajectory:
        asked = self.question
        options = self.options | {"samples": samples, "seed": seed, "record": "last"}
        if place.law == "limit":
            layer = asked.limit(place.gamma, place.tau0)
            return solve(layer, asked.start(), T=asked.d / asked.n, check=False, **options)
        return propagate(self.layer(place), asked.start(), n=asked.n, d=asked.d, **options)

    def layer(self, place: Place, m: int | None = None) -> Layer:
        """The block of finite width."""
        if place.law == "network":
            return self.question.network(place.gamma, place.tau0, m)
        return self.question.compared(place.law, place.gamma, m)

    def choose_seed(self, place: Place, stage: str, number: int) -> int:
        """Other places, stages and rounds have other seeds; gamma and tau0 enter by their bits."""
        words = np.array([place.gamma, place.tau0]).view(np.uint32)
        source = np.random.SeedSequence([self.seed, LAWS.index(place.law), STAGES.index(stage), number, *map(int, words)])
        return int(source.generate_state(1, np.uint64)[0])

    def row(self, place: Place) -> Row:
        record = self.records[place]
        found = median(torch.cat(record.correlation)), median(torch.cat(record.growth))
        gradient = self.gradients.get(place)
        return Row(place.law, place.gamma, place.tau0, record.count, *record.failures, *found, gradient)

    def backpropagate(self, place: Place) -> Row:
        """Measures the spread of the gradients at this place.

        Networks that leave the float range have none, nor those whose mask shows one of the first tokens later ones alone.
        """
        asked, m = self.question, min(self.question.m, GRADIENT_TOKENS)
        if not asked.lets_attend(m):
            return self.row(place)
        found = backpropagate(
            self.layer(place, m),
            asked.start(m),
            n=asked.n,
            d=asked.d,
            outputs=1,
            loss=squared_error,
            samples=GRADIENT_NETWORKS,
            seed=self.choose_seed(place, "gradients", 0),
            **self.options,
        )
        ratios = (found.tokens[0].double() / found.tokens[-1].double()).cpu()
        ratios = ratios[ratios.isfinite()]
        if len(ratios):
            self.gradients[place] = GradientSpread(median(ratios), median_interval(ratios.tolist()), len(ratios), m)
        return self.row(place)

    def rows(self) -> list[Row]:
        """All rows of shaped blocks, in order."""
        places = sorted((place for place in self.records if place.law not in COMPARED), key=lambda p: (p.law, p.tau0, p.gamma))
        return [self.row(place) for place in places]
