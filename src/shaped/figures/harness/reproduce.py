"""`shaped reproduce`: every figure of the paper, its claims, and one report."""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

import shaped
from shaped.checks import usable
from shaped.figures.harness import cache as store
from shaped.figures.harness.claims import HOLDS, counted
from shaped.figures.harness.jobs import Lab, NoData, Result
from shaped.figures.shared import runs as training
from shaped.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALES = ("quick", "paper")
FIGURES = ("fig1", "fig2", "fig3", "fig4", "fig5", "fig7", "fig8", "output", "masks")
"""In the order of the report. An id is the name of a module of this package that is a `Page`."""
TRAINED = ("fig6", "table1", "table2")
"""Those that read finished training runs, whose folders their settings are told too. They follow the others."""


class Page(Protocol):
    """What a figure's module has. A page that reads files (finished training runs) puts their hashes into its settings."""

    TITLE: str
    SHOWS: str

    def settings(self, scale: str, /, *runs: tuple[Path, ...]) -> Any:
        """A dataclass of plain values: all that determines the numbers, but for tokens, seed and device."""

    def compute(self, settings: Any, lab: Lab, /) -> Result: ...

    def draw(self, summary: dict[str, Any], arrays: dict[str, np.ndarray], /) -> Figure: ...


def page(id: str) -> Page:
    return cast(Page, import_module(f"shaped.figures.pages.{id}"))


def chosen(ids: Sequence[str], runs: Sequence[Path] = ()) -> tuple[str, ...]:
    """The figures asked for, each once, in the order of the report; all are without those of training, unless there are runs to read.

    Runs that cannot be read are an error, whether or not a figure needs them.
    """
    known = FIGURES + TRAINED
    for id in ids:
        if id not in (*known, "all"):
            raise ValueError(f"figures must be among {', '.join(known)}, or all, got {id!r}")
    training.settings(tuple(runs))
    everything = known if runs else FIGURES
    return tuple(id for id in known if (id in everything and (not ids or "all" in ids)) or id in ids)


def workers_by_default(device: str) -> int | None:
    """A process for each core; none on a GPU, which one process keeps busy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if device == "cpu" and cores > 1 else None


def key(id: str, scale: str, lab: Lab) -> dict[str, Any]:
    """All that determines a figure's numbers."""
    trained = id in TRAINED
    return {
        "figure": id,
        "title": page(id).TITLE,
        "shows": page(id).SHOWS,
        "version": shaped.__version__,
        "code": code(trained),
        "scale": "training" if trained else scale,
        "tokens": None if trained else lab.tokens,
        "seed": lab.seed,
        "device": lab.device,
        "settings": asdict(settings_of(id, scale, lab)),
    }


@cache
def code(trained: bool) -> str:
    """A hash of all that computes numbers and claims: what was made by other code, or held against other thresholds, is made anew."""
    root, digest = Path(shaped.__file__).parent, hashlib.sha256()
    rooms = ("figures/**", "train/**") if trained else ("", "layers/**", "nn/**", "kernels/**", "figures/**")
    for path in sorted({path for room in rooms for path in root.glob(f"{room}/*.py".lstrip("/"))}):
        if path.name not in ("report.py", "style.py"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def settings_of(id: str, scale: str, lab: Lab) -> Any:
    return page(id).settings(scale, lab.runs) if id in TRAINED else page(id).settings(scale)


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
    """Computes what is not yet in `out`, draws everything, and writes the report, whose path it returns.

    What the runs have nothing for is left out; where it was asked for by its id, that is an error, once the rest is made.
    """
    from shaped.figures.harness.report import write_report

    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    if not find_spec("matplotlib"):
        raise ValueError("reproduce needs matplotlib: pip install 'shaped-transformer[plot]'")
    wanted, lab = chosen(ids, runs), Lab(tokens, seed, device, executor, tuple(runs))
    usable(device)
    # To read runs takes no time: what is wrong with them is said before the figures take theirs.
    pages, missing = {}, {}
    for id in wanted:
        if id in TRAINED:
            try:
                pages[id] = made(id, out, scale, lab, again, say)
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
        saved, note = pages[id] if id in pages else made(id, out, scale, lab, again, say)
        rows = saved.summary["claims"]
        claims += rows
        say(f"{id:<7} {counted(rows)}; {note}")
        for row in rows:
            if row["verdict"] != HOLDS:
                say(f"        {row['id']} {row['verdict']}: {row['claim']}: {row['reason']}")
    say(f"in all  {counted(claims)}")
    report = write_report(out, FIGURES + TRAINED, say)
    if named:
        raise NoData(f"{named[0]}; the rest is in {report}")
    return report


def made(id: str, out: Path, scale: str, lab: Lab, again: bool, say: Callable[[str], None]) -> tuple[store.Saved, str]:
    """A figure's numbers, from disk or computed now, drawn, and how they came about."""
    its_key = key(id, scale, lab)
    saved = None if again else from_disk(id, out, its_key, say)
    if saved is not None:
        return saved, f"from {out}, computed in {saved.summary['seconds']:.1f} s"
    began = time.perf_counter()
    with progress(id) as advance:
        result = page(id).compute(settings_of(id, scale, lab), replace(lab, advance=advance))
    seconds = time.perf_counter() - began
    for kind in ("png", "pdf"):  # a picture of other numbers must not stand beside these
        (out / f"{id}.{kind}").unlink(missing_ok=True)
    saved = store.save(out, id, its_key, result, seconds)
    draw(id, out, saved)
    return saved, f"{seconds:.1f} s"


def from_disk(id: str, out: Path, its_key: dict[str, Any], say: Callable[[str], None]) -> store.Saved | None:
    """A figure's numbers, drawn, if they are there and whole. What is damaged is said, and computed anew."""
    try:
        saved = store.load(out, id, its_key)
        if saved is not None:
            draw(id, out, saved)
    except OSError:
        raise
    except Exception as error:  # drawing arrays that are not the figure's can go wrong in any way
        words = (
            str(error) if isinstance(error, ValueError) else f"{id}.npz must be the figure's arrays, got {type(error).__name__}, {error}"
        )
        say(f"{id:<7} is computed anew: {' '.join(words.split())}")
        return None
    return saved


def draw(id: str, out: Path, saved: store.Saved) -> None:
    """PNG and PDF, from the saved numbers alone."""
    from shaped.figures.harness.style import styled

    shown = {store.SHOWN: saved.summary["arrays_sha256"]}
    with styled():
        figure = page(id).draw(saved.summary, saved.arrays)
        for kind, metadata in (("png", shown), ("pdf", {"CreationDate": None})):  # no date: the same numbers give the same files
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=220, metadata=metadata)
            write_atomically(out / f"{id}.{kind}", lambda file, buffer=buffer: file.write(buffer.getvalue()))


@contextmanager
def progress(id: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, and nothing elsewhere: told how many of how many simulations are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    console = Console(stderr=True)
    bar = Progress(
        id, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    )
    with bar:
        task = bar.add_task(id, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
