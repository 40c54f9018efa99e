"""Masks: beyond the paper, the law of causal attention with heads and output projection, SDE against network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shaped.figures import laws
from shaped.figures.lab import Lab, Result
from shaped.layers import ShapedAttention, ShapedFeedForward

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "The attention that people use has an SDE too"
SHOWS = (
    "Beyond the paper: Figure 1's right panel for causal attention with 8 heads and an output projection, followed by the feed-forward "
    "layer. The mask tells the tokens apart, so the first two tokens and the last two are shown on their own."
)


@dataclass(frozen=True, kw_only=True)
class Settings(laws.Settings):
    heads: int = 8
    mask: str = "causal"
    project: bool = True


SCALES = {"quick": Settings(samples=2**10), "paper": Settings()}


def settings(scale: str) -> Settings:
    return SCALES[scale]


def compute(settings: Settings, lab: Lab) -> Result:
    attention = ShapedAttention(settings.gamma, settings.tau0, settings.heads, settings.project, settings.mask)
    found = lab.run(laws.law_jobs("causal", settings, attention >> ShapedFeedForward(settings.gamma), lab))
    claims = [
        *laws.pair_claims("masks.first", "the SDE describes the first two tokens", "rho", found, "causal", lab, pair=(0, 1)),
        *laws.pair_claims("masks.last", "the SDE describes the last two tokens", "rho", found, "causal", lab, last=True),
        *laws.pair_claims("masks.covariance", "the SDE describes the last two tokens", "V", found, "causal", lab, last=True),
    ]
    m = lab.tokens
    arrays = laws.drawn_densities("rho", found, "causal", lab, pair=(0, 1))
    return Result(arrays | laws.drawn_densities("rho", found, "causal", lab, pair=(m - 2, m - 1)), claims)


def draw(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> Figure:
    from shaped.figures.style import densities_panel, sheet

    m = summary["tokens"]
    pairs = [(0, 1)] if m == 2 else [(0, 1), (m - 2, m - 1)]
    figure, panels = sheet(len(pairs), 3.3 * len(pairs), sharey=True)
    for axes, (a, b) in zip(panels, pairs, strict=True):
        densities_panel(axes, arrays, f"rho{a}{b}", rf"$\rho^{{{a + 1}\,{b + 1}}}_d$")
        axes.set(xlim=(-1, 1), xticks=(-1, -0.5, 0, 0.5, 1))
    panels[0].legend(loc="upper left")
    for axes in panels[1:]:
        axes.set_ylabel("")
    return figure
