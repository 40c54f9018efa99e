"""Gradients, layer by layer: of the shaped network, and beside those of blocks in use."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from shaped.advice.question import squared_error
from shaped.explore.charts import Chart, Series, draw_axis, draw_chart, draw_line, draw_spread
from shaped.explore.networks import NAMES, make_compared, make_start
from shaped.explore.panels.unit import Breathe, Found
from shaped.explore.plan import LAST, Plan
from shaped.gradients import Gradients, backpropagate

WEIGHTS = ("query", "value")
LOGITS = ("query", "key")
"""Matrices whose squared gradient is O(1/n): the logits that they make are."""


def answer_gradients(plan: Plan, breathe: Breathe) -> Iterator[Found]:
    asked, samples = plan.question, plan.differentiated
    n, d = plan.shrink() if plan.stage == 0 else (asked.width, asked.depth)
    draw = partial(backpropagate, V0=make_start(asked), n=n, d=d, outputs=1, loss=squared_error, seed=asked.seed, progress=breathe)
    blocks = make_compared(asked)
    found = {"shaped": draw(blocks.pop("shaped"), samples=samples)}
    notes = [f"preview: networks of width {n} and depth {d}"] if plan.stage == 0 else []
    yield Found("gradients", samples, draw_gradients(found["shaped"], plan, n, d, notes))
    if plan.stage == LAST:
        return
    if plan.stage:
        found |= {role: draw(block, samples=samples) for role, block in blocks.items()}
    yield Found("blocks_gradients", samples, draw_block_gradients(found, plan, d, notes))


def draw_gradients(found: Gradients, plan: Plan, n: int, d: int, notes: list[str]) -> Chart:
    """Norms, not squares. Those of a preview by a small network are drawn at the large one's layers."""
    asked = plan.question
    layers = spread_layers(d, asked.depth)
    series: list[Series] = draw_spread("tokens", "tokens", layers, found.tokens.sqrt())
    for name in WEIGHTS:
        squares = found.weights[name_matrix(found, name)] * (n / asked.width if name in LOGITS else 1.0)
        series += draw_spread(name, name, layers[1:], squares.sqrt(), band=False)
    about = (
        "Norm of the gradient of a squared loss, with respect to the tokens that enter each layer, and to its query and value weights: "
        "medians over networks, and the band of 90 % of them."
    )
    x, y = draw_axis("layer", low=0, high=asked.depth), draw_axis("norm of the gradient", "log")
    return draw_chart("Gradients", x, y, series, notes, about)


def name_matrix(found: Gradients, name: str) -> str:
    """The full name of the attention layer's matrix."""
    return next(full for full in found.weights if full.rpartition(".")[2] == name)


def spread_layers(d: int, depth: int) -> Tensor:
    return torch.linspace(0, depth, d + 1, dtype=torch.float64)


def draw_block_gradients(found: dict[str, Gradients], plan: Plan, d: int, notes: list[str]) -> Chart:
    layers = spread_layers(d, plan.question.depth)
    series: list[Series] = []
    for role, one in found.items():
        ratios = (one.tokens / one.tokens[-1]).sqrt()
        series.append(draw_line(f"{NAMES[role]}, median", role, layers, ratios.double().nanquantile(0.5, dim=-1)))
    about = "Norm of the gradient with respect to the tokens of each layer, over that at the last layer: medians over networks."
    x, y = draw_axis("layer", low=0, high=plan.question.depth), draw_axis("gradient, relative to the last layer", "log")
    return draw_chart("Blocks: gradients", x, y, series, notes, about)
