"""The map of gamma and tau0: the share of networks that fail by the rule of `advise`, and where few enough do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from shaped.advice.question import Question as Judge
from shaped.advice.rows import Row
from shaped.advice.search import count_for_proof
from shaped.explore.charts import Chart, draw_axis, draw_chart
from shaped.explore.fields import Question
from shaped.explore.networks import make_block, make_start
from shaped.explore.panels.unit import Breathe, Found
from shaped.explore.plan import LAST, Plan
from shaped.finite import propagate
from shaped.limit import solve
from shaped.trajectory import Trajectory

GAMMAS = tuple(2.0 ** (step - 4.5) for step in range(5))
"""From 1/sqrt(512) to 1/sqrt(2)."""
TEMPERATURES = tuple(4.0**step for step in range(-2, 3))
"""From 1/16 to 16."""
PREVIEW_STEPS = 6
FRESH = 10**6
"""Added to the seed of proofs; above every seed of the form."""
Rows = dict[tuple[float, float], Row]
"""By gamma and tau0."""


@dataclass(frozen=True)
class Grid:
    gammas: Sequence[float]
    temperatures: Sequence[float]


def answer_map(plan: Plan, breathe: Breathe) -> Iterator[Found]:
    judge = make_judge(plan.question)
    grid = choose_grid(plan)
    rows: Rows = {}
    for gamma in grid.gammas:
        rows |= judge_gamma(plan, judge, gamma, grid.temperatures, plan.cell, breathe)
    yield Found("map", plan.cell, draw_map(plan, judge, grid, rows, []))
    if plan.stage == 0:
        return
    proof, left = count_for_proof(judge.share), plan.proof
    candidates = list_candidates(rows, grid, judge.share)
    while candidates and proof * count_places(candidates) <= left:
        left -= proof * count_places(candidates)
        for gamma, temperatures in candidates.items():
            rows |= judge_gamma(plan, judge, gamma, temperatures, proof, breathe, fresh=True)
        candidates = list_smaller(candidates, rows, grid, judge)
    tried = left < plan.proof
    notes = []
    if tried:
        notes = [
            f"outlined: {proof} networks prove, with 95 % confidence, that less than {100 * judge.share:g} % fail",
            "smaller gammas are not tried: fewer are taken to fail there, as in advise",
        ]
    if candidates:
        notes += [f"no proof: {proof} networks for each of {count_places(candidates)} cells take too long here; shaped advise does it"]
    yield Found("map", proof if tried else plan.cell, draw_map(plan, judge, grid, rows, notes), LAST)


def make_judge(asked: Question) -> Judge:
    """The rule of `advise`. Its own blocks are not used: those of the map are the page's."""
    mask = None if asked.mask == "none" else asked.mask
    return Judge(asked.width, asked.depth, asked.tokens, asked.heads, mask, asked.qk_norm, rho=asked.rho)


def choose_grid(plan: Plan) -> Grid:
    """With QK-norm every temperature is a simulation of its own, so there are fewer."""
    coarse = plan.stage == 0
    temperatures = TEMPERATURES[::2] if coarse and plan.question.qk_norm else TEMPERATURES
    return Grid(GAMMAS[::2] if coarse else GAMMAS, temperatures)


def judge_gamma(
    plan: Plan, judge: Judge, gamma: float, temperatures: Sequence[float], count: int, breathe: Breathe, *, fresh: bool = False
) -> Rows:
    """A row for each temperature, of so many samples; `fresh`: of a seed that chose no candidate.

    Without QK-norm all of them are one simulation. Every layer but the logits is homogeneous in the tokens, and the logits depend on
    V/tau0 alone. So tokens of covariance V0/tau0 at temperature 1 are those of covariance V0 at tau0, divided by sqrt(tau0).
    """
    if plan.question.qk_norm:
        parts = [
            simulate(plan, make_block(plan.question, gamma, tau0), torch.ones(count, dtype=torch.float64), breathe, fresh)
            for tau0 in temperatures
        ]
    else:
        scales = 1.0 / torch.tensor(temperatures, dtype=torch.float64).repeat_interleave(count)
        paths = simulate(plan, make_block(plan.question, gamma, 1.0), scales, breathe, fresh)
        parts = [select(paths, slice(i * count, (i + 1) * count)) for i in range(len(temperatures))]
    law = "limit" if plan.stage == 0 else "network"
    return {(gamma, tau0): judge_paths(judge, law, gamma, tau0, part) for tau0, part in zip(temperatures, parts, strict=True)}


def simulate(plan: Plan, block: Any, scales: torch.Tensor, breathe: Breathe, fresh: bool) -> Trajectory:
    """From V0 times each of the scales, and divided by it again at the end."""
    asked = plan.question
    start = make_start(asked) * scales[:, None, None]
    options: dict[str, Any] = {"seed": asked.seed + FRESH * fresh, "record": "last", "progress": breathe, "dtype": torch.float32}
    if plan.stage == 0:
        # Euler's steps are cheap also where paths explode, and need not be right there.
        paths = solve(block, start, T=asked.time, steps=PREVIEW_STEPS, method="euler", check=False, **options)
    else:
        paths = propagate(block, start, n=asked.width, d=asked.depth, **options)
    return replace(paths, V=paths.V.double() / scales[:, None, None])


def select(paths: Trajectory, part: slice) -> Trajectory:
    return Trajectory(paths.t, paths.V[:, part], paths.stopped[part])


def judge_paths(judge: Judge, law: str, gamma: float, tau0: float, paths: Trajectory) -> Row:
    judged = judge.judge(paths)
    aligned, exploded = judged.failed.sum(0).tolist()
    medians = judged.correlation.median().item(), judged.growth.median().item()
    return Row(law, gamma, tau0, len(judged.failed), aligned, exploded, *medians)


def list_candidates(rows: Rows, grid: Grid, share: float) -> dict[float, list[float]]:
    """For each temperature the largest gamma at which, as at all smaller ones, no more fail than may; by gamma."""
    found: dict[float, list[float]] = {}
    for tau0 in grid.temperatures:
        good = [gamma for i, gamma in enumerate(grid.gammas) if all(rows[one, tau0].share <= share for one in grid.gammas[: i + 1])]
        if good:
            found.setdefault(good[-1], []).append(tau0)
    return found


def list_smaller(tried: dict[float, list[float]], rows: Rows, grid: Grid, judge: Judge) -> dict[float, list[float]]:
    """After proofs that failed the next smaller gammas, as in `advise`."""
    failed = {gamma: [tau0 for tau0 in each if not is_proved(rows[gamma, tau0], judge)] for gamma, each in tried.items()}
    smaller = {larger: gamma for gamma, larger in pairwise(grid.gammas)}
    return {smaller[gamma]: each for gamma, each in failed.items() if each and gamma in smaller}


def count_places(candidates: dict[float, list[float]]) -> int:
    return sum(map(len, candidates.values()))


def draw_map(plan: Plan, judge: Judge, grid: Grid, rows: Rows, notes: list[str]) -> Chart:
    asked = plan.question
    cells = [[rows[gamma, tau0] for gamma in grid.gammas] for tau0 in grid.temperatures]
    what = "SDE paths" if plan.stage == 0 else "networks"
    series = [
        {
            "kind": "cells",
            "name": "share that fails",
            "x_edges": find_edges(grid.gammas),
            "y_edges": find_edges(grid.temperatures),
            "values": [[row.share for row in line] for line in cells],
            "labels": [[describe_cell(row, what, judge.share) for row in line] for line in cells],
            "outline": "largest γ, proved safe",
            "outlined": [[is_proved(row, judge) for row in line] for line in cells],
        },
        {"kind": "point", "name": "this question", "role": "here", "x": asked.gamma, "y": asked.tau0},
    ]
    rule = f"fails: mean |ρ| above {judge.correlation:g} or length above {judge.growth:g} at the last layer"
    safe = [row for line in cells for row in line if is_proved(row, judge)]
    if safe:
        best = max(safe, key=lambda row: (row.gamma, -row.tau0))
        notes = [*notes, f"largest gamma that is proved: {best.gamma:.3g}, at tau0 {best.tau0:.3g}"]
    preview = ["preview: paths of the SDE"] if plan.stage == 0 else []
    about = "Share of networks that align their tokens or explode, for values of gamma and tau0; outlined where it is proved that few do."
    x = draw_axis("γ", "log", find_edges(grid.gammas)[0], find_edges(grid.gammas)[-1])
    y = draw_axis("τ₀", "log", find_edges(grid.temperatures)[0], find_edges(grid.temperatures)[-1])
    return draw_chart("Map of gamma and tau0", x, y, series, [rule, *preview, *notes], about)


def is_proved(row: Row, judge: Judge) -> bool:
    return row.law == "network" and row.verdict(judge.share) == "safe"


def describe_cell(row: Row, what: str, share: float) -> str:
    low, high = row.interval
    shares = f"{100 * row.share:.3g} % ({100 * low:.2g} to {100 * high:.2g})"
    return f"gamma {row.gamma:.3g}, tau0 {row.tau0:.3g}: {row.failed} of {row.count} {what} fail, {shares}; {row.verdict(share)}"


def find_edges(centres: Sequence[float]) -> list[float]:
    """Cells meet half-way between their centres, in logarithms."""
    logs = [math.log(one) for one in centres]
    inner = [(one + other) / 2 for one, other in pairwise(logs)]
    first, last = (logs[0] - (inner[0] - logs[0]), logs[-1] + (logs[-1] - inner[-1])) if inner else (logs[0] - 0.5, logs[0] + 0.5)
    return [round(math.exp(one), 6) for one in (first, *inner, last)]
