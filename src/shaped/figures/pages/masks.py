"""Masks: beyond the paper, the law of causal attention with heads and output projection, for the network, its SDE and two wrong SDEs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shaped.compare import Sample
from shaped.figures.harness.claims import Row
from shaped.figures.harness.page import Result
from shaped.figures.harness.simulator import Simulator
from shaped.figures.shared import laws
from shaped.figures.shared.density import joint_densities
from shaped.figures.shared.ensembles import FACES, Arrays, make_ensemble, simulate_arrays
from shaped.layers import Layer, ShapedAttention, ShapedFeedForward

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "The attention that people use has an SDE too"
SHOWS = (
    "Beyond the paper: causal attention with 8 heads and an output projection, followed by the feed-forward layer, at the last layer. The "
    "tokens start along one line, every second one turned round (correlations ±0.9), where attention does most. The first token sees only "
    "itself: attention makes the others longer than it, and their correlation with it weaker. Full attention would lengthen all alike, "
    "which changes no correlation. Dashed: the SDE; thin: the SDE of full attention, and that without attention, neither of which the "
    "network follows."
)
CONTRAST = 0.25
"""Least distance between the network's correlations and a wrong SDE's: half way between the tolerance for the right SDE at the quick
scale (0.11) and the distance between the SDEs (0.38 to 0.41, measured before any network was simulated)."""
WRONG = {"full": "of full attention", "none": "without attention"}
CORRELATIONS, RATIOS = (-0.98, -0.95, -0.9, -0.8, -0.6, -0.3, 0.0), (0.5, 0.7, 1.0, 1.4, 2.0)  # where the axes, artanh and log, have ticks
NO_ATTENTION = 1e6  # a temperature at which attention is the identity


@dataclass(frozen=True, kw_only=True)
class Settings(laws.Settings):
    """Figure 1's width and depth. The rest was chosen with the SDEs alone: far apart from each other, with few exploding paths."""

    gamma: float = 0.25
    tau0: float = 0.5
    rho: float = 0.9
    alternating: bool = True
    heads: int = 8
    mask: str = "causal"
    project: bool = True


SCALES = {"quick": Settings(samples=2**10), "paper": Settings()}


def settings(scale: str) -> Settings:
    return SCALES[scale]


def make_block(settings: Settings, **other: Any) -> Layer:
    how = {"tau0": settings.tau0, "heads": settings.heads, "project": settings.project, "mask": settings.mask}
    return ShapedAttention(settings.gamma, **(how | other)) >> ShapedFeedForward(settings.gamma)


def compute(settings: Settings, simulator: Simulator) -> Result:
    right = make_block(settings)
    layers = {"network": right, "sde": right, "full": make_block(settings, mask=None), "none": make_block(settings, tau0=NO_ATTENTION)}
    options: dict[str, Any] = {"samples": settings.samples, "step": settings.step, "alternating": settings.alternating, "single": True}
    found = simulator.run(
        {
            (m, name): partial(
                simulate_arrays, make_ensemble(settings, layer, m, simulator, **options), "network" if name == "network" else "sde"
            )
            for m in reversed(simulator.token_counts)  # the longest first
            for name, layer in layers.items()
        }
    )
    claims = []
    for m in simulator.token_counts:
        claims += judge_masks(m, {name: read_statistics(found[m, name]) for name in layers}, simulator.seed)
    drawn = {name: read_statistics(found[simulator.tokens, name]) for name in layers}
    arrays: dict[str, np.ndarray] = {}
    for statistic in drawn["network"]:
        arrays |= joint_densities(statistic, {name: samples[statistic].ravel() for name, samples in drawn.items()})
    return Result(arrays, claims)


def read_statistics(arrays: Arrays) -> dict[str, Sample]:
    """The samples that are compared. Correlations are artanh(rho), which has the same distances and is unbounded; two tokens have one."""
    paths = laws.drop_stopped(arrays)
    V, rho = paths.V[-1].double().numpy(), paths.rho[-1].double().numpy()
    z = np.arctanh(np.clip(rho[:, 0], -1 + 1e-12, 1 - 1e-12))
    lengths = 0.5 * np.log(V[:, -1, -1] / V[:, 0, 0])
    ends = {"ends": z[:, -1:]} if V.shape[-1] > 2 else {}
    return {"first": z[:, 1:2]} | ends | {"lengths": lengths[:, None]}


def judge_masks(m: int, samples: dict[str, dict[str, Sample]], seed: int) -> list[Row]:
    network, sde = (samples[face] for face in FACES)
    words = {"first": "the first two tokens' correlation", "ends": "the first and last tokens' correlation"}
    rows = []
    for name in (name for name in words if name in network):
        of = f"Kolmogorov-Smirnov distance of {words[name]}"
        rows.append(laws.judge_law(f"masks.{name}", m, f"the SDE describes the network: {of}", network[name], sde[name], seed))
        for wrong, which in WRONG.items():
            claim, theirs = f"the SDE {which} does not: {of}", samples[wrong][name]
            rows.append(laws.judge_law(f"masks.{name}.not-{wrong}", m, claim, network[name], theirs, seed, at_least=CONTRAST))
    claim = "the SDE describes the network: Kolmogorov-Smirnov distance of the last token's length over the first's"
    return [*rows, laws.judge_law("masks.lengths", m, claim, network["lengths"], sde["lengths"], seed)]


def draw(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> Figure:
    from shaped.figures.harness.style import GREEN, VERMILION, draw_densities, make_panels, sort_densities

    m = summary["tokens"]
    labels = {
        "first": "correlation of the\nfirst two tokens (artanh axis)",
        "ends": "correlation of the first and\nthe last token (artanh axis)",
        "lengths": f"length of token {m} over\nthat of token 1 (log axis)",
    }
    names = [name for name in labels if f"{name}_sde_grid" in arrays]
    figure, panels = make_panels(len(names), height=2.9)
    for axes, name in zip(panels, names, strict=True):
        for wrong, line, colour in (("full", "-.", VERMILION), ("none", ":", GREEN)):
            grid, density = arrays[f"{name}_{wrong}_grid"], arrays[f"{name}_{wrong}_density"]
            axes.plot(grid, density, line, color=colour, linewidth=0.9, label=f"SDE {WRONG[wrong]}")
        draw_densities(axes, arrays, name, labels[name])
        ticks, places = (RATIOS, np.log(RATIOS)) if name == "lengths" else (CORRELATIONS, np.arctanh(CORRELATIONS))
        axes.set_xticks(places, [f"{tick:g}" for tick in ticks])
        axes.set(xlim=tuple(arrays[f"{name}_sde_grid"][[0, -1]]), ylabel="")
    panels[0].set_ylabel("density per unit of artanh or log")
    figure.legend(handles=sort_densities(panels[0]), loc="outside upper center", ncols=3)
    return figure


def describe(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    words = {"first": "correlation of the first two tokens", "ends": "correlation of the first and the last", "lengths": "ratio of lengths"}
    said = []
    for name in (name for name in words if f"{name}_sde_grid" in arrays):
        places = (float(arrays[f"{name}_{which}_grid"][arrays[f"{name}_{which}_density"].argmax()]) for which in ("network", "sde", *WRONG))
        network, sde, full, none = (np.exp(place) if name == "lengths" else np.tanh(place) for place in places)
        said.append(f"{words[name]}: network {network:.2f}, its SDE {sde:.2f}, full attention {full:.2f}, none {none:.2f}")
    return f"Four densities in each panel: network, its SDE, the SDEs of full and of no attention. They are highest at: {'; '.join(said)}."
