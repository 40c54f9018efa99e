"""The shaped block against its SDE: correlation over depth and at the last layer, the largest eigenvalue, the entropy of attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shaped.compare import compare
from shaped.covariance import correlation
from shaped.explore.charts import Chart, Series, as_list, as_number, draw_axis, draw_chart, draw_paths, draw_rule, draw_spread
from shaped.explore.networks import EXPLODED, make_attention, make_block, make_start
from shaped.explore.panels.attention import draw_entropy_axis, draw_entropy_shares
from shaped.explore.panels.unit import Breathe, Found
from shaped.explore.plan import RESAMPLES, Plan
from shaped.finite import propagate
from shaped.intervals import format_share
from shaped.limit import solve
from shaped.trajectory import Trajectory

SHOWN = 12
"""Single paths of each law."""
BINS = 30
NAMES = {"sde": "SDE", "network": "networks"}


def answer_laws(plan: Plan, breathe: Breathe) -> Iterator[Found]:
    asked = plan.question
    laws = simulate_laws(plan, breathe)
    samples = min(one.V.shape[1] for one in laws.values())
    layers = {role: one.t * asked.width for role, one in laws.items()}
    yield Found("paths", samples, draw_correlations(laws, layers, asked.depth))
    breathe(0)
    yield Found("density", samples, draw_density(laws, plan))
    breathe(0)
    yield Found("eigenvalue", samples, draw_eigenvalues(laws, layers, asked.depth))
    breathe(0)
    yield Found("entropy", samples, draw_entropies(laws, layers, plan, breathe))


def simulate_laws(plan: Plan, breathe: Breathe) -> dict[str, Trajectory]:
    """The SDE, and from stage 1 on networks."""
    asked = plan.question
    block, V0 = make_block(asked), make_start(asked)
    options: dict[str, Any] = {"seed": asked.seed, "upper": EXPLODED, "progress": breathe}
    steps, every = plan.steps, plan.record_steps
    laws = {"sde": solve(block, V0, T=asked.time, steps=steps, samples=plan.paths, record=every, check=False, **options)}
    if plan.stage:
        sizes = {"n": asked.width, "d": asked.depth}
        laws["network"] = propagate(block, V0, samples=plan.networks, record=plan.record, **sizes, **options)
    return laws


def mean_correlation(V: Tensor) -> Tensor:
    """Over pairs of tokens, [..., m, m] to [...]."""
    m = V.shape[-1]
    return (correlation(V).sum((-2, -1)) - m) / (m * (m - 1))


def hide_stopped(values: Tensor, paths: Trajectory) -> Tensor:
    """The values, [time, sample], with nan from the time on at which a path stopped."""
    return values.masked_fill(paths.stopped <= paths.t[:, None], math.nan)


def draw_correlations(laws: dict[str, Trajectory], layers: dict[str, Tensor], depth: int) -> Chart:
    series: list[Series] = []
    for role, one in laws.items():
        rho = hide_stopped(mean_correlation(one.V), one)
        series += [draw_paths(f"{min(SHOWN, rho.shape[1])} {NAMES[role]}", role, layers[role], rho[:, :SHOWN].T)]
        series += draw_spread(NAMES[role], role, layers[role], rho)
    about = "Mean correlation of pairs of tokens against the layer: single paths, their median and the band of 90 % of them."
    return draw_chart(
        "Correlation of the tokens",
        draw_axis("layer", low=0, high=depth),
        draw_axis("mean ρ", high=1.0),
        series,
        describe_stops(laws),
        about,
    )


def describe_stops(laws: dict[str, Trajectory]) -> list[str]:
    shares = ", ".join(f"{NAMES[role]} {format_share(one.stopped_share, one.V.shape[1])}" for role, one in laws.items())
    return [f"exploding (an eigenvalue above {EXPLODED:g}): {shares}"]


def draw_density(laws: dict[str, Trajectory], plan: Plan) -> Chart:
    found = {role: mean_correlation(one.V[-1][one.stopped > one.t[-1]]) for role, one in laws.items()}
    everything = torch.cat(list(found.values()))
    if not len(everything):
        raise ValueError("no path reaches the last layer: all of them explode before it")
    low, high = everything.min().item(), everything.max().item()
    spread = max(high - low, 1e-3)
    edges = torch.linspace(max(-1.0, low - 0.02 * spread), min(1.0, high + 0.02 * spread), BINS + 1, dtype=torch.float64)
    series = []
    for role, values in found.items():
        if len(values):
            heights = torch.histogram(values.clamp(edges[0], edges[-1]), edges, density=True).hist
            series.append({"kind": "steps", "name": NAMES[role], "role": role, "edges": as_list(edges), "heights": as_list(heights)})
    series.append(draw_rule("start", x=plan.question.rho))
    medians = [f"{NAMES[role]} {as_number(values.quantile(0.5).item())}" for role, values in found.items() if len(values)]
    notes = [f"median: {', '.join(medians)}"]
    about = "Density of the mean correlation at the last layer, over the paths that have not exploded."
    if "network" in laws and min(map(len, found.values())) > 1:
        statistics = {"mean rho": mean_correlation}
        distances = compare(laws["sde"], laws["network"], statistics=statistics, resamples=RESAMPLES, seed=plan.question.seed)
        ks = distances.ks["mean rho"]
        verdict = "not told apart" if ks.within_band else "different laws"
        notes.append(f"Kolmogorov-Smirnov distance {ks.value:.3f} ± {ks.error:.3f}; one law: below {ks.band:.3f} ({verdict})")
    return draw_chart("Correlation at the last layer", draw_axis("mean ρ"), draw_axis("density", low=0), series, notes, about)


def draw_eigenvalues(laws: dict[str, Trajectory], layers: dict[str, Tensor], depth: int) -> Chart:
    series: list[Series] = []
    for role, one in laws.items():
        series += draw_spread(NAMES[role], role, layers[role], torch.linalg.eigvalsh(one.V)[..., -1])
    series.append(draw_rule("exploding", y=EXPLODED))
    about = "Largest eigenvalue of the covariance of the tokens against the layer: its median and the band of 90 % of the paths."
    x, y = draw_axis("layer", low=0, high=depth), draw_axis("largest eigenvalue of V", "log")
    return draw_chart("Largest eigenvalue", x, y, series, describe_stops(laws), about)


def draw_entropies(laws: dict[str, Trajectory], layers: dict[str, Tensor], plan: Plan, breathe: Breathe) -> Chart:
    attention = make_attention(plan.question, plan.question.gamma, plan.question.tau0)
    series: list[Series] = []
    for role, one in laws.items():
        shares = hide_stopped(draw_entropy_shares(attention, one.V[:-1], plan, breathe), Trajectory(one.t[:-1], one.V[:-1], one.stopped))
        series += draw_spread(NAMES[role], role, layers[role][:-1], shares)
    about = "Entropy of the softmax, its mean over heads and queries, as a share of that of uniform attention, against the layer."
    x, y = draw_axis("layer", low=0, high=plan.question.depth), draw_entropy_axis(series)
    return draw_chart("Entropy of attention", x, y, series, [], about)
