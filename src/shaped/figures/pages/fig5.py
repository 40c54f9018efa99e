"""Figure 5: when shaped attention becomes unstable, and how a smaller gamma delays it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shaped.figures.harness.claims import bootstrap_interval, judge
from shaped.figures.harness.page import Result
from shaped.figures.harness.simulator import Simulator
from shaped.figures.shared import stability
from shaped.figures.shared.ensembles import FACES, Ensemble
from shaped.figures.shared.stability import (
    CAP,
    NEXT,
    SLACK,
    TWO_TOKENS,
    difference,
    estimate_median,
    find_largest_rise,
    simulate_stopping_times,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Smaller γ delays instability"
SHOWS = (
    "Shaped attention from an adversarial start, tokens of length 10√n. Left: paths of the largest eigenvalue of V over "
    "logarithmic time. Right: stopping time, at which an eigenvalue passes 10⁴ or falls below 10⁻⁴, capped at 1. At this start the logits "
    "are of order 100/√n, not small: the network's softmax saturates, which its limit cannot, so the SDE (dashed) explodes long before the "
    "network (solid)."
)

FALL = 0.5  # of the network's median, capped at 1, from the smallest to the largest γ: "tuning γ smaller will delay" it (Sec. 4.4)
STABLE = 1.0  # median at the smallest γ: the cap, "very straight forward to stabilize" (Sec. 4.4)
SURVIVORS = "with two tokens and γ near 1 only part of the SDE's paths explode by time 1, two thirds at γ = 0.7 and fewer at 0.9"
FRAME = 1e-4  # time between the points of a drawn path of the SDE, whose paths explode within a few thousandths
LEAST = 60.0  # where the axis of the eigenvalues begins; they start near 160 with four tokens
SDE_FALL = 2.0  # ratio of the SDE's medians at the smallest and the largest γ


@dataclass(frozen=True, kw_only=True)
class Settings(stability.Settings):
    tau0: float = 1.0
    gammas: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    drawn: tuple[float, ...] = (0.1, 0.2, 0.7)
    step: float = 1e-4  # of the SDE, whose paths explode within a few layers
    paths: int = 8


SCALES = {"quick": Settings(gammas=(0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9), step=2e-4), "paper": Settings()}


def settings(scale: str) -> Settings:
    return SCALES[scale]


def simulate_largest_eigenvalues(ensemble: Ensemble, face: str) -> np.ndarray:
    """Simulates; returns the largest eigenvalue of each path at each recorded time, [time, sample]; nan after a path has stopped."""
    paths = ensemble.simulate(face)
    values = np.linalg.eigvalsh(paths.V.cpu().numpy())[..., -1]
    values[paths.t.numpy()[:, None] > paths.stopped.numpy() + 1e-9] = np.nan
    return values


def compute(settings: Settings, simulator: Simulator) -> Result:
    gammas = settings.gammas

    def ensemble(gamma: float, m: int) -> Ensemble:
        return stability.make_ensemble(settings, gamma, settings.tau0, m, simulator.seed, simulator.device, settings.step)

    jobs: dict[Any, Any] = {
        (m, g, face): partial(simulate_stopping_times, ensemble(g, m), face)
        for m in simulator.token_counts
        for g in gammas
        for face in FACES
    }
    every = {"network": 1, "sde": max(1, round(FRAME / settings.step))}
    few = {
        ("paths", g, face): partial(
            simulate_largest_eigenvalues, replace(ensemble(g, simulator.tokens), samples=settings.paths, record=every[face]), face
        )
        for g in settings.drawn
        for face in FACES
    }
    found = simulator.run(jobs | few)
    claims, arrays = (
        [],
        {"gamma": np.array(gammas), "drawn": np.array(settings.drawn), "bounds": np.array([settings.lower, settings.upper])},
    )
    for m in simulator.token_counts:
        medians = {face: np.array([estimate_median(found[m, g, face], simulator.seed) for g in gammas]) for face in FACES}
        network = medians["network"]
        why, why_sde = (TWO_TOKENS, SURVIVORS) if m == 2 else ("", "")
        words = f"the median stopping time falls as γ grows; its largest rise {NEXT}"
        first, low, high = network[0]
        fold = ratio(found[m, gammas[0], "sde"], found[m, gammas[-1], "sde"], simulator.seed)
        claims += [
            judge("fig5.rise", m, f"network: {words}", *find_largest_rise(network), at_most=SLACK, why=why),
            judge(
                "fig5.fall",
                m,
                "network: its fall from the smallest to the largest γ",
                *difference(network[0], network[-1]),
                at_least=FALL,
                why=why,
            ),
            judge("fig5.stable", m, "network: at the smallest γ the median is the cap", first, (low, high), at_least=STABLE),
            judge("fig5.sde.rise", m, f"SDE: {words}", *find_largest_rise(medians["sde"]), at_most=SLACK, why=why_sde),
            judge("fig5.sde.fall", m, "SDE: median at the smallest γ over that at the largest", *fold, at_least=SDE_FALL, why=why_sde),
        ]
        if m == simulator.tokens:
            for face in FACES:
                arrays[f"median_{face}"] = medians[face]
                arrays[f"tenth_{face}"] = np.array([np.percentile(found[m, g, face], 10) for g in gammas])
    for g in settings.drawn:
        for face in FACES:
            arrays[f"eigenvalues_{g:g}_{face}"] = found["paths", g, face]
    return Result(arrays, claims)


def ratio(early: np.ndarray, late: np.ndarray, seed: int) -> tuple[float, tuple[float, float]]:
    both = np.stack([early, late], 1)
    return bootstrap_interval(both, lambda drawn: float(np.median(drawn[:, 0]) / np.median(drawn[:, 1])), seed)


def draw(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> Figure:
    from matplotlib.lines import Line2D

    from shaped.figures.harness.style import BLACK, BLUE, FACE_NAMES, LINES, make_panels, pick_ordered_colours

    figure, (paths, times) = make_panels(2, height=2.9)
    drawn = arrays["drawn"]
    colours = pick_ordered_colours(len(drawn))
    first = CAP / (2 * max(len(values) - 1 for name, values in arrays.items() if name.startswith("eigenvalues_")))  # in the place of 0
    for gamma, colour in zip(drawn, colours, strict=True):
        for face in LINES:
            values = arrays[f"eigenvalues_{gamma:g}_{face}"]
            paths.plot(np.linspace(0.0, CAP, len(values)).clip(first), values, LINES[face], color=colour, linewidth=0.8)
    lower, upper = arrays["bounds"]
    paths.axhline(upper, color=BLACK, linestyle=":", linewidth=0.8)
    box = {"color": "white", "pad": 0.5, "alpha": 0.85}
    how: Any = {"fontsize": 7, "va": "bottom", "zorder": 2.4, "bbox": box}  # above the paths, below the axes
    paths.text(first, 1.15 * upper, f" upper bound {write_power(upper)}", **how)
    paths.text(first, 1.05 * LEAST, f" lower bound {write_power(lower)}: far below", **how)
    keys = [Line2D([], [], color=BLACK, linestyle=LINES[face], linewidth=1.0, label=FACE_NAMES[face]) for face in LINES]
    keys += [Line2D([], [], color=colour, label=rf"$\gamma={gamma:g}$") for gamma, colour in zip(drawn, colours, strict=True)]
    paths.legend(handles=keys, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    paths.set(xlabel=r"$t=\ell/n$", ylabel=r"$\lambda_{\max}(V_\ell)$", xscale="log", yscale="log")
    paths.set(xlim=(first, CAP), ylim=(LEAST, 4 * upper))
    for face in LINES:
        value, low, high = arrays[f"median_{face}"].T
        colour = BLUE if face == "network" else BLACK
        name = "network" if face == "network" else "SDE"
        times.plot(arrays["gamma"], value, LINES[face], color=colour, marker="o", markersize=3, label=f"{name}, median")
        times.fill_between(arrays["gamma"], low, high, color=colour, alpha=0.15, linewidth=0)
        times.plot(
            arrays["gamma"],
            arrays[f"tenth_{face}"],
            LINES[face],
            color=colour,
            marker="v",
            markersize=3,
            alpha=0.6,
            linewidth=0.9,
            label=f"{name}, 10th percentile",
        )
    times.axhline(CAP, color=BLACK, linestyle=":", linewidth=0.8)
    times.text(arrays["gamma"][-1], 1.1 * CAP, "cap", fontsize=7, ha="right", va="bottom")
    times.set(xlabel=r"$\gamma$", ylabel=r"stopping time $t^*$", yscale="log", ylim=(None, 2 * CAP))
    times.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


def write_power(value: float) -> str:
    return rf"$10^{{{np.log10(value):.0f}}}$"


def describe(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    gamma, network, sde = arrays["gamma"], arrays["median_network"][:, 0], arrays["median_sde"][:, 0]
    tops, ends = [], []
    for one in arrays["drawn"]:
        dashed = arrays[f"eigenvalues_{one:g}_sde"]
        last = np.isfinite(dashed).sum(0).max() - 1
        ends.append(f"t = {CAP * last / (len(dashed) - 1):.2g} or before (γ = {one:g})")
        paths = arrays[f"eigenvalues_{one:g}_network"]
        crossed = int((np.nanmax(paths, 0) > arrays["bounds"][1]).sum())
        tops.append(f"{crossed} of {paths.shape[1]} at γ = {one:g}")
    return (
        f"Left: paths of the largest eigenvalue over logarithmic time; of the solid paths of networks {', '.join(tops)} reach the upper "
        f"bound; the dashed paths of the SDE end at {', '.join(ends)}. Right: from γ = {gamma[0]:g} to {gamma[-1]:g} the median stopping "
        f"time of the network goes from {network[0]:.2g} to {network[-1]:.2g}, that of the SDE from {sde[0]:.2g} to {sde[-1]:.2g}."
    )
