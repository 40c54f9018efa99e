"""`shaped reproduce`: the paper's figures and tables, with their claims checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shaped.commands.console import Lines
from shaped.commands.options import OUTPUT, PLACE, SOLVER, WORK, Device, Scheduler, Seed, show_choices
from shaped.commands.results import check_folder
from shaped.workers import open_executor


def reproduce(
    figures: Annotated[
        list[str] | None,
        typer.Argument(help="Ids: fig1 to fig8, output, masks, gradients, table1, table2; by default, or with all, those without runs."),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="quick (few samples) or paper (the captions' numbers).", rich_help_panel=SOLVER, **show_choices("quick", "paper")
        ),
    ] = "quick",
    tokens: Annotated[
        int, typer.Option(help="Number of tokens m that is drawn; claims are checked for 2, 4 and 8 too.", rich_help_panel=SOLVER)
    ] = 4,
    seed: Seed = 0,
    device: Device = "cpu",
    workers: Annotated[
        int | None, typer.Option(help="Processes to share the work; by default one a core on the CPU.", rich_help_panel=WORK)
    ] = None,
    scheduler: Scheduler = None,
    again: Annotated[bool, typer.Option("--again", help="Compute also what is in the folder already.", rich_help_panel=OUTPUT)] = False,
    runs: Annotated[
        list[Path] | None,
        typer.Option(help="Folders or files of training runs, for fig6, table1 and table2; repeatable.", rich_help_panel=OUTPUT, **PLACE),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for numbers, pictures and report.", rich_help_panel=OUTPUT, **PLACE)] = Path("out"),
) -> None:
    """Compute and draw the paper's figures, check their claims, and write report.html."""
    from shaped.figures.harness import reproduce as harness

    if workers is None and scheduler is None:
        workers = harness.workers_by_default(device)
    ids = harness.select_pages(figures or [], runs or [])  # refuses unknown ids before anything is written
    how: dict[str, Any] = {"scale": scale, "tokens": tokens, "seed": seed, "device": device, "again": again, "runs": runs or []}
    check_folder(out, *harness.list_files(ids))
    lines = Lines()
    with open_executor(workers, scheduler) as executor:
        harness.reproduce(figures or [], out, executor=executor, say=lines.say, **how)
    lines.end(out)
