"""What the commands that simulate leave: a JSON file and a picture on disk first, then a table on the console."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from shaped.commands.console import Lines
from shaped.files import make_folder, write_atomically, write_json
from shaped.process import suggest_install


def check_folder(out: Path) -> None:
    """Makes the folder and writes to it once, before the work and not after it."""
    make_folder(out)
    with TemporaryFile(dir=out):
        pass


def write_results(out: Path, name: str, summary: dict[str, Any], draw: Callable[[], bytes] | None) -> list[Path]:
    write_json(out / f"{name}.json", summary)
    written = [out / f"{name}.json"]
    (out / f"{name}.png").unlink(missing_ok=True)  # an earlier run's picture, of other numbers
    if draw is not None and find_spec("matplotlib"):
        picture = draw()
        write_atomically(out / f"{name}.png", lambda file: file.write(picture))
        written.append(out / f"{name}.png")
    return written


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


def draw_table(table: Any) -> str:
    from rich.console import Console

    drawn, terminal = io.StringIO(), Console()
    Console(file=drawn, width=terminal.width, force_terminal=terminal.is_terminal).print(table)
    return drawn.getvalue()
