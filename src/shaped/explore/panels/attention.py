"""Entropy of attention at the layers of a trajectory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shaped.covariance import correlation
from shaped.explore.charts import Series, draw_axis
from shaped.explore.panels.unit import Breathe
from shaped.explore.plan import Plan
from shaped.layers import ShapedAttention
from shaped.nn.diagnostics import softmax_entropy
from shaped.nn.functional import logit_bias

ENTRIES = 2**17
"""Of the attention matrices that are drawn at once. More would take longer than a cancelled question may."""
PREVIEWED, MOST = 2**19, 2**23
"""Of all of them, in the preview and later."""
FEWEST = 4
SHORTEST = 1e-3
"""Of the axis of entropies: smaller differences from uniform attention are drawn as none."""


def draw_entropy_axis(series: list[Series]) -> dict[str, Any]:
    """From the least entropy to that of uniform attention, which is 1: most curves lie so close to it that an axis from 0 shows nothing."""
    values = [value for one in series for name in ("y", "low", "high") for value in one.get(name, ()) if value is not None]
    length = max(1.0 - min(values, default=1.0), SHORTEST)
    return draw_axis("entropy / uniform", low=max(0.0, 1.0 - 1.1 * length), high=1.0 + 0.05 * length)


def draw_entropy_shares(attention: ShapedAttention, V: Tensor, plan: Plan, breathe: Breathe, normalised: bool = False) -> Tensor:
    """The entropy over that of uniform attention, [time, sample], for covariances [time, sample, m, m] that enter the layer.

    With many tokens and heads only the first samples have it, the others nan.

    Given the covariance, logits with fresh weights have the law of the network's own: the result's law at each layer is exact.
    `normalised`: the layer sees tokens after LayerNorm, whose covariance is their correlation up to O(1/n).
    """
    V = correlation(V) if normalised else V
    times, samples, m, _ = V.shape
    shares = V.new_full((times, samples), torch.nan)
    few = max(FEWEST, (PREVIEWED if plan.stage == 0 else MOST) // (times * m**2 * attention.heads))
    V = V[:, :few]
    uniform = softmax_entropy(logit_bias(attention.mask, m, V)).mean().item()
    together = max(1, ENTRIES // (V.shape[1] * m**2 * attention.heads))
    for first in range(0, times, together):
        part = V[first : first + together]
        found = attention.entropy(part.flatten(0, 1), n=plan.question.width, seed=plan.question.seed + first)
        shares[first : first + together, :few] = found.unflatten(0, part.shape[:2]) / uniform
        breathe(1)
    return shares
