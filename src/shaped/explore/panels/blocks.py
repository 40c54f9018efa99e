"""The shaped block beside blocks in use: correlation, length, gradients and entropy of attention by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shaped.advice.question import squared_error
from shaped.explore.charts import Chart, Series, draw_axis, draw_chart, draw_spread
from shaped.explore.networks import EXPLODED, NAMES, make_attentions, make_block, make_compared, make_start
from shaped.explore.panels.attention import draw_entropy_shares
from shaped.explore.panels.gradients import describe_preview, draw_token_gradients, spread_layers
from shaped.explore.panels.laws import hide_stopped, mean_correlation
from shaped.explore.panels.unit import Breathe, Found
from shaped.explore.plan import PREVIEW_BLOCKS, Plan
from shaped.finite import propagate
from shaped.gradients import backpropagate
from shaped.limit import solve
from shaped.trajectory import Trajectory

PREVIEW = 4
"""Networks of each kind of block in the preview."""


def answer_blocks(plan: Plan, breathe: Breathe) -> Iterator[Found]:
    asked = plan.question
    paths = preview_blocks(plan, breathe) if plan.stage == 0 else simulate_blocks(plan, breathe)
    samples = min(one.V.shape[1] for one in paths.values())
    notes = [f"preview: the SDE, and the first {min(PREVIEW_BLOCKS, asked.depth)} layers of the others"] if plan.stage == 0 else []
    rho, length, entropy = [], [], []
    attentions = make_attentions(asked)
    for role, one in paths.items():
        x, single = one.t * asked.width, role == "shaped"
        rho += draw_spread(NAMES[role], role, x, hide_stopped(mean_correlation(one.V), one), single)
        lengths = one.V.diagonal(dim1=-2, dim2=-1).mean(-1).sqrt()
        length += draw_spread(NAMES[role], role, x, lengths, single)
        entering = Trajectory(one.t[:-1], one.V[:-1], one.stopped)
        shares = draw_entropy_shares(attentions[role], entering.V, asked, breathe, normalised=role == "preln")
        entropy += draw_spread(NAMES[role], role, x[:-1], hide_stopped(shares, entering), single)
    layer = draw_axis("layer", low=0, high=asked.depth)
    about = "{} by layer, for the shaped block, the same block without shaping, Pre-LN and Post-LN: medians over networks."
    yield Found(
        "blocks",
        samples,
        draw_chart("Blocks: correlation", layer, draw_axis("mean ρ", high=1.0), rho, notes, about.format("Mean correlation of the tokens")),
    )
    yield Found(
        "blocks_length",
        samples,
        draw_chart(
            "Blocks: length",
            layer,
            draw_axis("length of the stream", "log"),
            length,
            notes,
            about.format("Root mean square length of the tokens"),
        ),
    )
    yield Found(
        "blocks_entropy",
        samples,
        draw_chart(
            "Blocks: entropy of attention",
            layer,
            draw_axis("entropy / uniform", low=0, high=1.02),
            entropy,
            notes,
            about.format("Entropy of attention over that of uniform attention"),
        ),
    )
    yield Found("blocks_gradients", plan.compared_differentiated, draw_block_gradients(plan, breathe))


def preview_blocks(plan: Plan, breathe: Breathe) -> dict[str, Trajectory]:
    """The SDE for the shaped block; of the others, which have none, the first layers."""
    asked = plan.question
    options: dict[str, Any] = {"seed": asked.seed, "upper": EXPLODED, "progress": breathe}
    few, V0 = min(PREVIEW_BLOCKS, asked.depth), make_start(asked)
    shaped = solve(make_block(asked), V0, T=asked.time, steps=plan.steps // 2, samples=plan.paths, check=False, **options)
    others = {role: block for role, block in make_compared(asked).items() if role != "shaped"}
    return {"shaped": shaped} | {
        role: propagate(block, V0, n=asked.width, d=few, samples=PREVIEW, **options) for role, block in others.items()
    }


def simulate_blocks(plan: Plan, breathe: Breathe) -> dict[str, Trajectory]:
    asked = plan.question
    options: dict[str, Any] = {"samples": plan.compared, "seed": asked.seed, "record": plan.record, "progress": breathe}
    return {
        role: propagate(block, make_start(asked), n=asked.width, d=asked.depth, **options) for role, block in make_compared(asked).items()
    }


def draw_block_gradients(plan: Plan, breathe: Breathe) -> Chart:
    asked = plan.question
    n, d = plan.shrink() if plan.stage == 0 else (asked.width, asked.depth)
    series: list[Series] = []
    for role, block in make_compared(asked).items():
        if plan.stage == 0 and role != "shaped":
            continue  # their depth is not that of a small network
        found = backpropagate(
            block, make_start(asked), n=n, d=d, outputs=1, loss=squared_error, samples=plan.compared_differentiated, seed=asked.seed,
            progress=breathe,
        )  # fmt: skip
        series.append(draw_token_gradients(NAMES[role], role, found, spread_layers(d, asked.depth)))
    notes = describe_preview(n, d) if plan.stage == 0 else []
    about = "Norm of the gradient with respect to the tokens of each layer, over that at the last layer: medians over networks."
    x, y = draw_axis("layer", low=0, high=asked.depth), draw_axis("gradient, relative to the last layer", "log")
    return draw_chart("Blocks: gradients", x, y, series, notes, about)
