"""The progress of a run: a bar, and the time that is left in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def describe_time(seconds: float) -> str:
    """About, in one unit: "40 seconds", "12 minutes", "3.5 hours", "9 days"."""
    for unit, length, most in (("seconds", 1.0, 90.0), ("minutes", 60.0, 90.0), ("hours", 3600.0, 48.0)):
        if seconds < most * length:
            return f"about {seconds / length:.2g} {unit}"
    return f"about {seconds / 86400.0:,.0f} days"


@contextmanager
def show_progress(wanted: bool, steps: int, done: int) -> Iterator[Callable[[int, float, float], None]]:
    """Loss, tokens a second and time left, on standard error. Yields what is to be called with step, loss and tokens a second."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    speed = TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]} tokens/s")
    columns = (MofNCompleteColumn(), BarColumn(), speed, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not wanted) as progress:
        task = progress.add_task("", total=steps, completed=done, loss=float("nan"), rate="")
        yield lambda step, loss, rate: progress.update(task, completed=step, loss=loss, rate=f"{rate:,.0f}")
