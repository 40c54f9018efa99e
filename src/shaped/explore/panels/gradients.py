"""Gradients of the shaped network, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shaped.advice.question import squared_error
from shaped.explore.charts import Chart, Series, draw_axis, draw_chart, draw_line, draw_spread
from shaped.explore.networks import make_block, make_start
from shaped.explore.panels.unit import Breathe, Found
from shaped.explore.plan import Plan
from shaped.gradients import Gradients, backpropagate

WEIGHTS = ("query", "value")
LOGITS = ("query", "key")
"""Matrices whose squared gradient is O(1/n): the logits that they make are."""


def answer_gradients(plan: Plan, breathe: Breathe) -> Iterator[Found]:
    asked = plan.question
    n, d = plan.shrink() if plan.stage == 0 else (asked.width, asked.depth)
    samples = plan.differentiated
    found = backpropagate(
        make_block(asked), make_start(asked), n=n, d=d, outputs=1, loss=squared_error, samples=samples, seed=asked.seed, progress=breathe
    )
    yield Found("gradients", samples, draw_gradients(found, plan, n, d))


def draw_gradients(found: Gradients, plan: Plan, n: int, d: int) -> Chart:
    """Norms, not squares. Those of a preview by a small network are drawn at the large one's layers."""
    asked = plan.question
    layers = spread_layers(d, asked.depth)
    series: list[Series] = draw_spread("tokens", "tokens", layers, found.tokens.sqrt())
    for name in WEIGHTS:
        squares = found.weights[name_matrix(found, name)] * (n / asked.width if name in LOGITS else 1.0)
        _, median = draw_spread(name, name, layers[1:], squares.sqrt())
        series.append(median)
    notes = describe_preview(n, d) if (n, d) != (asked.width, asked.depth) else []
    about = "Norm of the gradient of a squared loss, with respect to the tokens that enter each layer and to the layer's query and value weights."
    x = draw_axis("layer", low=0, high=asked.depth)
    return draw_chart("Gradients", x, draw_axis("norm of the gradient", "log"), series, notes, about)


def name_matrix(found: Gradients, name: str) -> str:
    """The full name of the attention layer's matrix."""
    return next(full for full in found.weights if full.rpartition(".")[2] == name)


def spread_layers(d: int, depth: int) -> Tensor:
    return torch.linspace(0, depth, d + 1, dtype=torch.float64)


def describe_preview(n: int, d: int) -> list[str]:
    return [f"preview: networks of width {n} and depth {d}"]


def draw_token_gradients(name: str, role: str, found: Gradients, layers: Tensor) -> Series:
    """The median over networks of the tokens' gradient, relative to that at the last layer."""
    ratios = (found.tokens / found.tokens[-1]).sqrt()
    return draw_line(name, role, layers, ratios.double().nanquantile(0.5, dim=-1))
