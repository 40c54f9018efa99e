"""Figure 1: the shaped Transformer keeps its tokens apart, and the SDE has the law of the network."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shaped.figures.harness.claims import judge, mean_interval
from shaped.figures.harness.page import Result
from shaped.figures.harness.simulator import Simulator
from shaped.figures.shared import laws
from shaped.figures.shared.ensembles import make_ensemble, make_models, simulate_mean_pairs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Shaping prevents rank collapse"
SHOWS = (
    "Left: mean correlation of the tokens against depth, for the shaped Transformer, the same unshaped, and Pre-LN (λ = γ = 1). "
    "Right: density of the correlation at the last layer, SDE against network, for the whole Transformer (fig7 has attention alone, as the "
    "paper's caption). Bands are 95 % intervals of the means."
)
# Pre-LN is simulated with explicit tokens, which takes most of the time.
SCALES = {"quick": laws.Settings(samples=2**9), "paper": laws.Settings(law_tokens=laws.PROVING)}
MODELS = ("shaped", "unshaped", "preln")

COLLAPSED = 0.999  # unshaped at the last layer; notes on Fig. 1 left: 1.000 at layer 150
APART = 0.35  # shaped at the last layer; the same notes: 0.15 to 0.21
MARGINAL = 0.9  # Pre-LN "provides only marginal improvements" (Sec. 1); the same notes: 0.955 to 0.963


def settings(scale: str) -> laws.Settings:
    return SCALES[scale]


def compute(settings: laws.Settings, simulator: Simulator) -> Result:
    layers = make_models(settings.gamma)
    jobs: dict[Any, Any] = {
        ("left", m, name): partial(simulate_mean_pairs, make_ensemble(settings, layers[name], m, simulator, record=2), ("rho",), False)
        for name in reversed(MODELS)  # the longest first
        for m in simulator.token_counts
    }
    found: dict[Any, Any] = simulator.run(jobs | laws.make_law_jobs("right", settings, laws.make_transformer(settings), simulator))
    claims = []
    for m in simulator.token_counts:
        at_end = {name: mean_interval(found["left", m, name]["rho"][-1]) for name in MODELS}
        claims += [
            judge(
                "fig1.unshaped",
                m,
                "without shaping the tokens align: mean correlation at the last layer",
                *at_end["unshaped"],
                at_least=COLLAPSED,
            ),
            judge("fig1.shaped", m, "shaping prevents it: mean correlation at the last layer", *at_end["shaped"], at_most=APART),
            judge(
                "fig1.preln",
                m,
                "Pre-LN improves it only marginally: mean correlation at the last layer",
                *at_end["preln"],
                at_least=MARGINAL,
            ),
        ]
    claims += laws.judge_pairs("fig1.law", "the SDE describes the shaped network", "rho", found, "right", simulator)
    arrays = laws.estimate_densities("rho", found, "right", simulator)
    arrays["layer"] = found["left", simulator.tokens, MODELS[0]]["layer"]
    for name in MODELS:
        rho = found["left", simulator.tokens, name]["rho"]
        arrays[f"mean_{name}"], error = rho.mean(1), rho.std(1, ddof=1) / np.sqrt(rho.shape[1])
        arrays[f"error_{name}"] = 1.96 * error
    return Result(arrays, claims)


def draw(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> Figure:
    from matplotlib.patches import Patch

    from shaped.figures.harness.style import COLOURS, GREY, NAMES, draw_densities, make_panels, sort_densities

    figure, (depth, density) = make_panels(2)
    for name in MODELS:
        mean, reach = arrays[f"mean_{name}"], arrays[f"error_{name}"]
        depth.plot(arrays["layer"], mean, color=COLOURS[name], label=NAMES[name])
        depth.fill_between(arrays["layer"], mean - reach, mean + reach, color=COLOURS[name], alpha=0.25, linewidth=0)
    depth.set(xlabel=r"layer $\ell$", ylabel=r"mean of $\rho^{\alpha\beta}_\ell$", ylim=(0, 1.03), xlim=(0, arrays["layer"][-1]))
    band = Patch(color=GREY, alpha=0.4, linewidth=0, label="95 % interval of a mean")
    depth.legend(handles=[*depth.get_legend_handles_labels()[0], band], loc="center right")
    draw_densities(density, arrays, "rho", r"$\rho^{\alpha\beta}_d$")
    density.set(xlim=(-1, 1), xticks=(-1, -0.5, 0, 0.5, 1))
    density.legend(handles=sort_densities(density), loc="upper left")
    return figure


def describe(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    from shaped.figures.harness.style import NAMES, describe_densities

    ends = ", ".join(f"{NAMES[name]} {arrays[f'mean_{name}'][-1]:.3g}" for name in MODELS)
    return (
        f"Left: three curves that start together at a mean correlation of {arrays['mean_shaped'][0]:.2g} and end, at layer "
        f"{arrays['layer'][-1]:.0f}, at: {ends}. Right: {describe_densities(arrays, 'rho', 'ρ')}."
    )
