"""`shaped reproduce`: every figure of the paper, its claims, and one report."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import shaped
from shaped.checks import check_device
from shaped.figures.harness import cache
from shaped.figures.harness.claims import HOLDS, describe_verdicts
from shaped.figures.harness.code_hash import hash_code
from shaped.figures.harness.page import NoData, Page
from shaped.figures.harness.simulator import Simulator
from shaped.files import write_atomically
from shaped.process import count_cores, require, to_line

PAGES = "shaped.figures.pages"
SCALES = ("quick", "paper")
FIGURES = ("fig1", "fig2", "fig3", "fig4", "fig5", "fig7", "fig8", "output", "masks", "gradients")
"""Ids of pages, in the order of the report: modules in `figures/pages`. Beside the command's help, only this module knows pages by name."""
TRAINED = ("fig6", "table1", "table2")
"""Pages that read finished training runs. They come after FIGURES."""


def load_page(id: str) -> Page:
    """The module of a page. Imported by name, so that the harness below stays independent of the pages."""
    return cast(Page, import_module(f"{PAGES}.{id}"))


def select_pages(ids: Sequence[str], runs: Sequence[Path] = ()) -> tuple[str, ...]:
    """The ids to reproduce, each once, in the order of the report. "all", or none, means FIGURES, and TRAINED too if there are runs.

    Runs that cannot be read are an error, whether or not a page needs them.
    """
    known = FIGURES + TRAINED
    for id in ids:
        if id not in (*known, "all"):
            raise ValueError(f"figures must be among {', '.join(known)}, or all, got {id!r}")
    if runs:
        load_page(TRAINED[0]).settings(SCALES[0], tuple(runs))
    everything = known if runs else FIGURES
    return tuple(id for id in known if (id in everything and (not ids or "all" in ids)) or id in ids)


def list_files(ids: Sequence[str]) -> list[str]:
    """What `reproduce` writes into its folder."""
    return [f"{id}.{kind}" for id in ids for kind in ("npz", "json", "png", "pdf")] + ["report.html"]


def workers_by_default(device: str) -> int | None:
    """One process a core on a CPU; None on a GPU, which one process keeps busy."""
    cores = count_cores()
    return cores if device == "cpu" and cores > 1 else None


def make_key(id: str, scale: str, simulator: Simulator) -> dict[str, Any]:
    """The key of a page in the cache: all that determines its numbers."""
    trained = id in TRAINED
    return {
        "figure": id,
        "title": load_page(id).TITLE,
        "shows": load_page(id).SHOWS,
        "version": shaped.__version__,
        "code": hash_code(f"{PAGES}.{id}"),
        "scale": "training" if trained else scale,
        "tokens": None if trained else simulator.tokens,
        "seed": simulator.seed,
        "device": simulator.device,
        "settings": asdict(make_settings(id, scale, simulator)),
    }


def make_settings(id: str, scale: str, simulator: Simulator) -> Any:
    return load_page(id).settings(scale, simulator.runs) if id in TRAINED else load_page(id).settings(scale)


def reproduce(
    ids: Sequence[str],
    out: Path,
    *,
    scale: str = "quick",
    tokens: int = 4,
    seed: int = 0,
    device: str = "cpu",
    executor: Executor | None = None,
    again: bool = False,
    runs: Sequence[Path] = (),
    say: Callable[[str], None] = print,
) -> Path:
    """Computes the pages that are not yet in `out`, draws all, writes the report and returns its path. The last line says what is new.

    A page for which the runs have no data is left out. If it was asked for by its id, that is an error, raised after the report is written.
    """
    from shaped.figures.harness.report import write_report

    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    require("reproduce", "plot", "matplotlib")
    wanted, simulator = select_pages(ids, runs), Simulator(tokens, seed, device, executor, tuple(runs))
    check_device(device)
    # Runs are read first, which is fast: errors in them come before the figures take their time.
    pages, missing = {}, {}
    for id in wanted:
        if id in TRAINED:
            try:
                pages[id] = load_or_compute(id, out, scale, simulator, again, say)
            except NoData as error:
                missing[id] = error
    named = [error for id, error in missing.items() if id in ids]
    if named and (not runs or len(missing) == len(wanted)):
        raise named[0]
    for id, error in missing.items():
        say(f"{id:<7} is left out: {error}")
    claims = []
    for id in wanted:
        if id in missing:
            continue
        saved, note = pages[id] if id in pages else load_or_compute(id, out, scale, simulator, again, say)
        rows = saved.summary["claims"]
        claims += rows
        say(f"{id:<7} {describe_verdicts(rows)}; {note}")
        for row in rows:
            if row["verdict"] != HOLDS:
                say(f"        {row['id']} {row['verdict']}: {row['claim']}: {row['reason']}")
    say(f"in all  {describe_verdicts(claims)}")
    report = write_report(out, FIGURES + TRAINED, say)
    if named:
        raise NoData(f"{named[0]}; the rest is in {report.path}")
    say(report.line)
    return report.path


def load_or_compute(
    id: str, out: Path, scale: str, simulator: Simulator, again: bool, say: Callable[[str], None]
) -> tuple[cache.Saved, str]:
    """A page's numbers, from the cache or computed now, and a note for the terminal that says which. Draws the picture."""
    its_key = make_key(id, scale, simulator)
    saved = None if again else load_and_draw(id, out, its_key, say)
    if saved is not None:
        return saved, f"from {out}, computed in {saved.summary['seconds']:.1f} s"
    began = time.perf_counter()
    with show_progress(id) as advance:
        result = load_page(id).compute(make_settings(id, scale, simulator), replace(simulator, advance=advance))
    seconds = time.perf_counter() - began
    for kind in ("png", "pdf"):  # if the run is killed now, no old picture stands beside the new numbers
        (out / f"{id}.{kind}").unlink(missing_ok=True)
    saved = cache.save(out, id, its_key, result, seconds)
    draw(id, out, saved)
    return saved, f"{seconds:.1f} s"


def load_and_draw(id: str, out: Path, its_key: dict[str, Any], say: Callable[[str], None]) -> cache.Saved | None:
    """The cached numbers of a page, after drawing them; None if there are none. If they are damaged, says so and returns None."""
    try:
        saved = cache.load(out, id, its_key)
        if saved is not None:
            draw(id, out, saved)
    except OSError:
        raise
    except Exception as error:  # drawing foreign arrays can raise anything
        foreign = f"{id}.npz must be the figure's arrays, got {type(error).__name__}, {error}"
        words = str(error) if isinstance(error, ValueError) else foreign
        say(f"{id:<7} is computed anew: {to_line(words)}")
        return None
    return saved


def draw(id: str, out: Path, saved: cache.Saved) -> None:
    """PNG and PDF, from the saved numbers alone."""
    from shaped.figures.harness.style import DPI, apply_style

    page, words = load_page(id), {cache.SHOWN: saved.summary["arrays_sha256"]}
    with apply_style():
        figure = page.draw(saved.summary, saved.arrays)
        words[cache.SEEN] = page.describe(saved.summary, saved.arrays)
        for kind, metadata in (("png", words), ("pdf", {"CreationDate": None})):  # no date: the same numbers give the same files
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=DPI, metadata=metadata)
            write_atomically(out / f"{id}.{kind}", lambda file, buffer=buffer: file.write(buffer.getvalue()))


@contextmanager
def show_progress(id: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal, nothing elsewhere. Yields a function to call with the numbers of jobs done and in all."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    console = Console(stderr=True)
    bar = Progress(
        id, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    )
    with bar:
        task = bar.add_task(id, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
