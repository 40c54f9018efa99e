"""A progress bar on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = bool | None | Callable[[int], None]


@contextmanager
def progress_bar(wanted: Progress, total: int, doing: str = "simulating") -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of steps done since the last call.

    The bar is shown after a second (None), at once (True) or never (False). It is never shown where standard error is not a terminal.
    A function takes the bar's place.
    """
    if callable(wanted):
        yield wanted
        return
    if wanted is False:
        yield lambda steps: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda steps: None
        return
    bar = Progress(doing, BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), console=console, transient=True)
    task = bar.add_task(doing, total=total)
    patience = time.monotonic() + (0.0 if wanted else 1.0)

    def advance(steps: int) -> None:
        bar.advance(task, steps)
        if not bar.live.is_started and time.monotonic() > patience:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()
