"""The shaped block beside blocks in use: correlation, length and entropy of attention by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shaped.explore.charts import Series, draw_axis, draw_chart, draw_spread
from shaped.explore.networks import EXPLODED, NAMES, make_attentions, make_compared, make_start
from shaped.explore.panels.attention import draw_entropy_axis, draw_entropy_shares
from shaped.explore.panels.laws import hide_stopped, mean_correlation
from shaped.explore.panels.unit import Breathe, Found
from shaped.explore.plan import PREVIEW_BLOCKS, Plan
from shaped.finite import propagate
from shaped.limit import solve
from shaped.trajectory import Trajectory

PREVIEW_NETWORKS, PREVIEW_STEPS, PREVIEW_PATHS = 4, 6, 32
ABOUT = "{} by layer, for the shaped block, the same block without shaping, Pre-LN and Post-LN: medians over networks."


def answer_blocks(plan: Plan, breathe: Breathe) -> Iterator[Found]:
    asked, attentions = plan.question, make_attentions(plan.question)
    paths = preview_blocks(plan, breathe) if plan.stage == 0 else simulate_blocks(plan, breathe)
    rho: list[Series] = []
    length: list[Series] = []
    entropy: list[Series] = []
    for role, one in paths.items():
        layers, name, band = one.t * asked.width, NAMES[role], role == "shaped"
        rho += draw_spread(name, role, layers, hide_stopped(mean_correlation(one.V), one), band)
        length += draw_spread(name, role, layers, one.V.diagonal(dim1=-2, dim2=-1).mean(-1).sqrt(), band)
        entering = Trajectory(one.t[:-1], one.V[:-1], one.stopped)
        shares = draw_entropy_shares(attentions[role], entering.V, plan, breathe, normalised=role == "preln")
        entropy += draw_spread(name, role, layers[:-1], hide_stopped(shares, entering), band)
    few = min(PREVIEW_BLOCKS, asked.depth)
    notes = [f"preview: the SDE, and the first {few} layers of the others"] if plan.stage == 0 else []
    samples = min(one.V.shape[1] for one in paths.values())
    layer = draw_axis("layer", low=0, high=asked.depth)
    for panel, title, y, series, what in (
        ("blocks", "Blocks: correlation", draw_axis("mean ρ", high=1.0), rho, "Mean correlation of pairs of tokens"),
        ("blocks_length", "Blocks: length", draw_axis("length of the stream", "log"), length, "Root mean square length of the tokens"),
        ("blocks_entropy", "Blocks: entropy", draw_entropy_axis(entropy), entropy, "Entropy of attention"),
    ):
        yield Found(panel, samples, draw_chart(title, layer, y, series, notes, ABOUT.format(what)))


def preview_blocks(plan: Plan, breathe: Breathe) -> dict[str, Trajectory]:
    """The SDE for the shaped block; of the others, which have none, the first layers."""
    asked = plan.question
    options: dict[str, Any] = {"seed": asked.seed, "upper": EXPLODED, "progress": breathe}
    V0, blocks = make_start(asked), make_compared(asked)
    shaped = solve(blocks.pop("shaped"), V0, T=asked.time, steps=PREVIEW_STEPS, samples=PREVIEW_PATHS, check=False, **options)
    sizes = {"n": asked.width, "d": min(PREVIEW_BLOCKS, asked.depth), "samples": PREVIEW_NETWORKS}
    return {"shaped": shaped} | {role: propagate(block, V0, **sizes, **options) for role, block in blocks.items()}


def simulate_blocks(plan: Plan, breathe: Breathe) -> dict[str, Trajectory]:
    asked = plan.question
    options: dict[str, Any] = {"samples": plan.compared, "seed": asked.seed, "record": plan.record, "progress": breathe}
    return {
        role: propagate(block, make_start(asked), n=asked.width, d=asked.depth, **options) for role, block in make_compared(asked).items()
    }
