"""Figure 3: the law of the correlation in a ResNet, for several strengths of the residual branch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from shaped.compare import compare
from shaped.figures.harness.claims import bootstrap_interval, find_rise, judge, judge_agreement
from shaped.figures.harness.page import Result
from shaped.figures.harness.simulator import Simulator
from shaped.figures.shared.density import correlation_density, pairs
from shaped.figures.shared.ensembles import FACES, Ensemble, make_ensemble, make_jobs, to_trajectory
from shaped.layers import ShapedFeedForward

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Weaker residual branches keep tokens from aligning"
SHOWS = (
    "Shaped-ReLU ResNet. Left: density of the correlation at the last layer for several γ; γ = 1 is the perceptron without skip "
    "connections, 1/√d (cut off at the top) the scaling whose limit is deterministic. "
    "Right: 95th percentile of the absolute correlation against γ. Solid: networks, dashed: SDE."
)

NO_FALL = 0.02  # "the increasing trend" (Sec. 3): between neighbours on the grid the percentile does not fall by more than this
CLOSE = 0.05  # "our SDE reliably approximates finite size networks" (caption): percentiles differ by at most this


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Fig. resnet."""

    n: int = 300
    d: int = 100
    rho: float = 0.2
    c_plus: float = 0.0
    c_minus: float = -1.0
    step: float = 0.01
    samples: int = 2**13
    gammas: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # 0.1 is 1/sqrt(d)
    drawn: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 1.0)


SCALES = {"quick": Settings(samples=2**9, gammas=(0.1, 0.3, 0.5, 0.7, 0.85, 1.0)), "paper": Settings()}


def settings(scale: str) -> Settings:
    return SCALES[scale]


def percentile(rho: np.ndarray) -> float:
    return float(np.percentile(np.abs(rho), 95))


def compute(settings: Settings, simulator: Simulator) -> Result:
    gammas = settings.gammas

    def ensemble(gamma: float, m: int) -> Ensemble:
        layer = ShapedFeedForward(gamma, settings.c_plus, settings.c_minus)
        return make_ensemble(settings, layer, m, simulator, step=settings.step, single=True)

    found = simulator.run(
        {(m, g, face): job for m in simulator.token_counts for g in gammas for face, job in make_jobs(ensemble(g, m)).items()}
    )
    claims, arrays = [], {"gamma": np.array(gammas), "drawn": np.array(settings.drawn)}
    for m in simulator.token_counts:
        paths = {g: [to_trajectory(found[m, g, face]) for face in FACES] for g in gammas}
        rho = {g: [pairs(path.rho[-1].double().numpy()) for path in paths[g]] for g in gammas}
        worst = max(
            (compare(*paths[g], statistics=("rho",), pair=None, seed=simulator.seed).ks["rho"] for g in settings.drawn),
            key=lambda ks: ks.value + ks.band,  # the distance whose interval reaches highest
        )
        high = {face: np.array([percentile_interval(rho[g][k], simulator.seed) for g in gammas]) for k, face in enumerate(FACES)}
        claims += [
            judge_agreement(
                "fig3.law",
                m,
                "the SDE describes the network at every γ drawn: largest Kolmogorov-Smirnov distance of the correlations",
                worst,
            ),
            judge_rise(m, high["network"]),
            judge_smallest_step(m, high["network"]),
            judge_gap(m, high),
        ]
        if m == simulator.tokens:
            arrays |= {f"percentile_{face}": high[face] for face in FACES}
            arrays["grid"] = np.linspace(-0.999, 0.999, 400)
            arrays |= {
                f"density_{i}_{face}": correlation_density(rho[g][k].ravel(), arrays["grid"])
                for i, g in enumerate(settings.drawn)
                for k, face in enumerate(FACES)
            }
    return Result(arrays, claims)


def percentile_interval(rho: np.ndarray, seed: int) -> tuple[float, float, float]:
    value, (low, high) = bootstrap_interval(rho, percentile, seed)
    return value, low, high


def judge_rise(m: int, high: np.ndarray) -> dict[str, Any]:
    words = "alignment becomes likelier as γ grows: rise of the 95th percentile of |ρ| from the smallest γ to 1"
    return judge("fig3.rise", m, words, *find_rise(high[0], high[-1]), at_least=0.0)


def judge_smallest_step(m: int, high: np.ndarray) -> dict[str, Any]:
    words = "and does so at each step in γ: smallest rise of the 95th percentile of |ρ| between neighbours"
    value, interval = min((find_rise(before, after) for before, after in pairwise(high)), key=lambda found: found[1][0])
    return judge("fig3.step", m, words, value, interval, at_least=-NO_FALL)


def judge_gap(m: int, high: dict[str, np.ndarray]) -> dict[str, Any]:
    words = "the SDE has the network's percentiles: largest difference over γ"
    both = zip(high["network"], high["sde"], strict=True)
    found = [find_rise(other, one) if one[0] >= other[0] else find_rise(one, other) for one, other in both]
    return judge("fig3.percentile", m, words, *max(found, key=lambda entry: entry[1][1]), at_most=CLOSE)


def draw(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> Figure:
    from shaped.figures.harness.style import BLUE, LINES, draw_line_key, make_panels, pick_ordered_colours

    figure, (density, percentiles) = make_panels(2)
    drawn = arrays["drawn"]
    for i, (gamma, colour) in enumerate(zip(drawn, pick_ordered_colours(len(drawn)), strict=True)):
        for face in LINES:
            label = (r"$1/\sqrt{d}$" if i == 0 else f"${gamma:g}$") if face == "network" else None
            density.plot(arrays["grid"], arrays[f"density_{i}_{face}"], LINES[face], color=colour, label=label)
    tallest = max(arrays[f"density_1_{face}"].max() for face in LINES)
    density.set(xlabel=r"$\rho^{\alpha\beta}_d$", ylabel="density", xlim=(-1, 1), xticks=(-1, -0.5, 0, 0.5, 1), ylim=(0, 1.25 * tallest))
    draw_line_key(density, loc="upper right")
    density.legend(title=r"$\gamma$", loc="upper left")
    for face in LINES:
        value, low, high = arrays[f"percentile_{face}"].T
        percentiles.plot(
            arrays["gamma"],
            value,
            LINES[face],
            color=BLUE if face == "network" else "black",
            linewidth=2.4 if face == "network" else 1.2,
            label="network" if face == "network" else "SDE",
        )
        percentiles.fill_between(arrays["gamma"], low, high, color=BLUE if face == "network" else "black", alpha=0.15, linewidth=0)
    percentiles.set(xlabel=r"$\gamma$", ylabel=r"95th percentile of $|\rho^{\alpha\beta}_d|$", ylim=(None, 1.0))
    percentiles.legend(loc="lower right")
    return figure


def describe(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    peaks = [f"{arrays['grid'][arrays[f'density_{i}_network'].argmax()]:.2g} at γ = {gamma:g}" for i, gamma in enumerate(arrays["drawn"])]
    high = arrays["percentile_network"][:, 0]
    gap = np.abs(high - arrays["percentile_sde"][:, 0]).max()
    return (
        f"Left: one density for each γ, highest near ρ = {', '.join(peaks)}. Right: the 95th percentile goes from "
        f"{high[0]:.2g} at γ = {arrays['gamma'][0]:g} to {high[-1]:.2g} at γ = {arrays['gamma'][-1]:g}; the SDE's curve is up to "
        f"about {gap:.1g} from it."
    )
