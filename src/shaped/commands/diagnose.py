"""`shaped diagnose`: is a model at risk? Verdicts in words, and a table by layer."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import shaped
from shaped.commands import options
from shaped.commands.console import Lines
from shaped.commands.options import PLACE, SOLVER
from shaped.commands.results import check_folder, draw_table, start_table
from shaped.diagnosis.curves import CURVES, list_curves
from shaped.diagnosis.models import count_positions, load_subject
from shaped.diagnosis.result import FILES
from shaped.files import check_writable

if TYPE_CHECKING:
    from rich.table import Table

TEXT: dict[str, Any] = PLACE | {"metavar": "FILE"}
ROWS = 12  # of a stack in the table; deeper ones are shown at some depths
SHOWN = {name: name for name in CURVES if name != "entropy_share"} | {"largest_logit": "max logit"}


def diagnose(
    model: Annotated[
        str,
        typer.Argument(help="A folder, a config.json (freshly initialised), or package.module:function.", metavar="MODEL"),
    ],
    text: Annotated[Path | None, typer.Option(help="Text for the model; by default random tokens.", **TEXT)] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a sequence; 128, or the model's positions.")] = None,
    sequences: Annotated[int | None, typer.Option(help="Sequences in the batch; 2 by default.")] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Initialisations for the bands: 0 for none; 8, or fewer of a large model.", rich_help_panel=SOLVER)
    ] = None,
    remedies: Annotated[bool, typer.Option(help="Try remedies for each verdict.")] = True,
    seed: options.Seed = 0,
    out: options.Out = Path("out"),
    as_json: options.Json = False,
) -> None:
    """Check a model: what it does to its tokens and gradients, layer by layer, in one forward and one backward pass.

    It says which rules find a risk, with layer, value, threshold and source, and what remedies that it tried do to the value.
    """
    for name, value, least in (("tokens", tokens, 2), ("sequences", sequences, 1)):  # one token has no pair and no next one
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    began = time.perf_counter()
    check_writable(out, files=FILES)  # also before a large model is loaded
    subject = load_subject(model, text=text, tokens=tokens, sequences=sequences, seed=seed)
    check_folder(out)
    try:
        found = shaped.diagnose(subject.model, subject.batch, seeds=seeds, seed=seed, remedies=remedies)
    except ValueError as error:
        positions = count_positions(subject.model)  # rotary positions have no end, so more of them are tried
        if tokens is not None and positions is not None and tokens > positions and str(error).startswith("batch must be what"):
            raise ValueError(f"tokens must be at most {positions}, the positions of {subject.name}, got {tokens}") from error
        raise
    found.info.update(name=subject.name, about=subject.about)
    written = found.save(out)
    lines = Lines()
    if as_json:
        lines.say(json.dumps(found.to_json(), allow_nan=False))
    else:
        lines.say(f"{subject.name}: risk {found.risk:.2f}")
        lines.say(describe_verdicts(found))
        if found.remark:
            lines.say(found.remark)
        if found.unseen:
            lines.say(found.unseen)
        for table in make_tables(found):
            lines.say(draw_table(table, whole=True).rstrip("\n"))
        lines.say(f"↑ ↓: above or below the band at initialisation, {found.bands.source}")
        lines.say(f"gradients of {found.observation.loss_kind}, {found.observation.loss:.4g}; {subject.about}")
        lines.say(f"{time.perf_counter() - began:.1f} s; seed {seed}")
        lines.say(f"written: {' '.join(map(str, written))}")
    lines.end(out)


def describe_verdicts(found: shaped.Diagnosis) -> str:
    """Each verdict, and below it what was tried."""
    lines = []
    for finding in found.verdicts:
        lines += [str(finding), *(f"  {trial}" for trial in (found.remedies.of(finding) if found.remedies else ()))]
    return "\n".join(lines) or str(found.verdicts)


def make_tables(found: shaped.Diagnosis) -> list[Table]:
    """One a stack. Row 0 is what enters the first layer."""
    tables = []
    for stack in found.observation.stacks:
        made = start_table(("layer", *SHOWN.values()), title=stack.name or None)
        curves, bands, depth = list_curves(stack), found.bands.stacks.get(stack.name, {}), len(stack.layers)
        for stage in choose_stages(depth):
            made.add_row(str(stage), *(format_value(curves[name], bands.get(name), stage, depth) for name in SHOWN))
        tables.append(made)
    return tables


def choose_stages(depth: int) -> list[int]:
    """All, or some of them: the first and the last among them."""
    if depth <= ROWS:
        return list(range(depth + 1))
    return sorted({0, 1, *(round(depth * share / (ROWS - 2)) for share in range(1, ROWS - 1))})


def format_value(values: list[float], band: Any, stage: int, depth: int) -> str:
    """With an arrow where the value is outside of the band. Attention and gradients have no value before the first layer."""
    place = stage - (depth + 1 - len(values))
    if place < 0 or math.isnan(values[place]):
        return ""
    slack = 1e-6 + 1e-3 * abs(values[place])  # what does not vary at all has a band of no width, and predictions are in single precision
    low, high = (band.low[place] - slack, band.high[place] + slack) if band else (-math.inf, math.inf)
    return f"{values[place]:.3g}" + ("↑" if values[place] > high else "↓" if values[place] < low else "")
