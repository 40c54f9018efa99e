"""What the commands that simulate leave: a JSON file and a picture on disk first, then a table on the console."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaped.commands.console import Lines
from shaped.files import check_writable, make_folder, write_atomically, write_json
from shaped.process import suggest_install

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table


def check_folder(out: Path, *files: str) -> None:
    """Makes the folder and writes to it once, before the work and not after it. `files` are what the work will write."""
    make_folder(out)
    check_writable(out, files=files)


def name_files(name: str) -> tuple[str, str]:
    """What `write_results` writes."""
    return f"{name}.json", f"{name}.png"


def write_results(out: Path, name: str, summary: dict[str, Any], draw: Callable[[], bytes] | None) -> list[Path]:
    numbers, shown = (out / file for file in name_files(name))
    write_json(numbers, summary)
    shown.unlink(missing_ok=True)  # an earlier run's picture, of other numbers
    if draw is None or not find_spec("matplotlib"):
        return [numbers]
    picture = draw()
    write_atomically(shown, lambda file: file.write(picture))
    return [numbers, shown]


def show_results(summary: dict[str, Any], table: Any, remark: str, written: list[Path], as_json: bool) -> None:
    """`table` is one of rich, drawn for this terminal, or a text, printed as it is."""
    lines = Lines()
    if as_json:
        lines.say(json.dumps(summary, allow_nan=False))
    else:
        lines.say((f"{table}\n" if isinstance(table, str) else draw_table(table)) + remark)
        lines.say(f"written: {' '.join(map(str, written))}")
        if not find_spec("matplotlib"):
            lines.say(f"no picture: matplotlib is not installed ({suggest_install('plot')})")
    lines.end(written[0].parent)


def start_table(columns: Iterable[str], words: int = 0, title: str | None = None) -> Table:
    """A table without rows. The first `words` columns are text, the others numbers."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < words else "right", no_wrap=True)
    return made


def draw_table(table: Any, whole: bool = False) -> str:
    """For this terminal; `whole`: at its full width, also where the terminal is narrower: numbers are not cut."""
    from rich.console import Console
    from rich.measure import Measurement

    drawn, terminal, wide = io.StringIO(), Console(), Console(width=1000)
    width = max(terminal.width, Measurement.get(wide, wide.options, table).maximum if whole else 0)
    Console(file=drawn, width=width, force_terminal=terminal.is_terminal).print(table)
    return drawn.getvalue()


def to_png(figure: Figure, dpi: int = 160) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()
