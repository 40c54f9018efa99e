"""Figure 8: the stopping time of shaped attention over gamma and tau0."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shaped.figures.harness.claims import judge
from shaped.figures.harness.page import Result
from shaped.figures.harness.simulator import Simulator
from shaped.figures.shared import stability
from shaped.figures.shared.stability import (
    EDGE,
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

TITLE = "Smaller γ and larger τ0 keep attention stable"
SHOWS = (
    "Median stopping time of networks of shaped attention, capped at 1, over γ and τ0, "
    "from the adversarial start and with the bounds of Figure 5."
)

GAIN = 0.5  # what the best τ0 adds to the median at the worst γ, and the other way round: "very straight forward to stabilize" (Sec. 4.4)


@dataclass(frozen=True, kw_only=True)
class Settings(stability.Settings):
    gammas: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    tau0s: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


SCALES = {"quick": Settings(gammas=(0.05, 0.1, 0.2, 0.4, 0.6, 0.9), tau0s=(0.5, 2.0, 8.0, 32.0, 128.0)), "paper": Settings()}


def settings(scale: str) -> Settings:
    return SCALES[scale]


def simulate_medians(settings: Settings, tau0: float, m: int, seed: int, device: str) -> np.ndarray:
    """Medians with their intervals at one tau0, [gamma, 3]."""
    times = (
        simulate_stopping_times(stability.make_ensemble(settings, gamma, tau0, m, seed, device), "network") for gamma in settings.gammas
    )
    return np.array([estimate_median(drawn, seed) for drawn in times])


def compute(settings: Settings, simulator: Simulator) -> Result:
    found = simulator.run(
        {
            (m, tau0): partial(simulate_medians, settings, tau0, m, simulator.seed, simulator.device)
            for m in simulator.token_counts
            for tau0 in settings.tau0s
        }
    )
    claims = []
    for m in simulator.token_counts:
        grid = np.stack([found[m, tau0] for tau0 in settings.tau0s])
        why = TWO_TOKENS if m == 2 else EDGE
        along_gamma = max((find_largest_rise(line) for line in grid), key=lambda entry: entry[1][1])
        along_tau0 = max((find_largest_rise(grid[::-1, k]) for k in range(len(settings.gammas))), key=lambda entry: entry[1][1])
        by_gamma, by_tau0 = difference(grid[0, 0], grid[0, -1]), difference(grid[-1, -1], grid[0, -1])
        claims += [
            judge("fig8.gamma", m, f"at every τ0 the median falls as γ grows; largest rise {NEXT}", *along_gamma, at_most=SLACK, why=why),
            judge("fig8.tau0", m, f"at every γ it grows with τ0; largest fall {NEXT}", *along_tau0, at_most=SLACK),
            judge("fig8.gamma.gain", m, "at the smallest τ0, what the smallest γ adds to the median", *by_gamma, at_least=GAIN, why=why),
            judge("fig8.tau0.gain", m, "at the largest γ, what the largest τ0 adds to the median", *by_tau0, at_least=GAIN, why=why),
        ]
    grid = np.stack([found[simulator.tokens, tau0][:, 0] for tau0 in settings.tau0s])
    return Result({"gamma": np.array(settings.gammas), "tau0": np.array(settings.tau0s), "median": grid}, claims)


def draw(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> Figure:
    from shaped.figures.harness.style import NARROW, make_panels

    figure, (axes,) = make_panels(1, NARROW, 3.1)
    values = arrays["median"]
    image = axes.imshow(values, origin="lower", aspect="auto", cmap="viridis", vmin=0.0, vmax=1.0)
    for (i, k), value in np.ndenumerate(values):
        axes.text(
            k,
            i,
            f"{value:.2f}".lstrip("0") if value < 0.995 else "1",
            ha="center",
            va="center",
            fontsize=6.5,
            color="black" if value > 0.55 else "white",
        )
    axes.set_xticks(range(len(arrays["gamma"])), [f"{gamma:g}" for gamma in arrays["gamma"]], rotation=45)
    axes.set_yticks(range(len(arrays["tau0"])), [f"{tau0:g}" for tau0 in arrays["tau0"]])
    axes.set(xlabel=r"$\gamma$", ylabel=r"$\tau_0$")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.colorbar(image, label=r"median of $t^*$", pad=0.02)
    return figure


def describe(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    values, gamma, tau0 = arrays["median"], arrays["gamma"], arrays["tau0"]
    row, column = np.unravel_index(values.argmin(), values.shape)
    return (
        f"A grid of {len(tau0)} values of τ0, from {tau0[0]:g} to {tau0[-1]:g} upwards, by {len(gamma)} of γ, from {gamma[0]:g} to "
        f"{gamma[-1]:g} to the right. In {int((values >= 1.0).sum())} of {values.size} cells the median is the cap, 1; it is smallest, "
        f"{values.min():.2g}, at τ0 = {tau0[row]:g} and γ = {gamma[column]:g}."
    )
