"""The code blocks of a page: finds them, runs them in one namespace, and compares what they print with what the page shows.

A Python block may have its output below it, in a block without a language. A block of `console` has commands, each after `$ `, and what
they print. A line that begins with "Not run when this page is built:" above a block says why it is not run.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(python|console)\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r"^Not run when this page is built: .*\n+\Z", re.MULTILINE)
DURATION = re.compile(r"\b\d[\d.]*(?= s\b)")


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    code: str
    shown: str
    runs: bool


@dataclass(frozen=True)
class Outcome:
    """What was wrong on a page, by line, and how long its blocks took."""

    wrong: list[tuple[int, str]]
    seconds: float
    count: int


def begin_work() -> None:
    """In a new process. This module must not import torch: its threads are counted when it is loaded, and two pages share the cores."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}


def find_blocks(text: str) -> Iterator[Block]:
    for found in FENCE.finditer(text):
        language, code, output = found.groups()
        before = text[: found.start()]
        yield Block(before.count("\n") + 1, language, code, output or "", not NOT_RUN.search(before))


def run_page(text: str) -> Outcome:
    """Runs the blocks of a page in this process, in a temporary folder that has the repository's examples/."""
    blocks, wrong, began = [block for block in find_blocks(text) if block.runs], [], time.monotonic()
    with enter_temporary_folder(), enter_namespace("page") as module:
        for block in blocks:
            try:
                printed, shown = run_block(block, module)
            except Exception:
                wrong.append((block.line, f"this block fails:\n{traceback.format_exc(limit=-2)}"))
                break
            if printed != shown:
                wrong.append((block.line, f"this block prints\n{printed}\nbut the page shows\n{shown}"))
    return Outcome(wrong, time.monotonic() - began, len(blocks))


@contextlib.contextmanager
def enter_temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("examples").symlink_to(ROOT / "examples")
        yield Path(folder)


@contextlib.contextmanager
def enter_namespace(name: str) -> Iterator[ModuleType]:
    """A module to run code in. Dataclasses look their module up by its name."""
    module = sys.modules[name] = ModuleType(name)
    try:
        yield module
    finally:
        del sys.modules[name]


def run_block(block: Block, module: ModuleType) -> tuple[str, str]:
    """What the block prints, and what it should print."""
    if block.language == "console":
        commands = [line[2:] for line in block.code.splitlines() if line.startswith("$ ")]
        printed = "".join(f"$ {command}\n{run_command(command)}" for command in commands)
        return DURATION.sub("…", printed), DURATION.sub("…", block.code)  # times are not the same twice
    return run_code(block.code, module), block.shown


def run_code(code: str, module: ModuleType, name: str = "block") -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, name, "exec"), vars(module))
    return printed.getvalue()


def run_command(command: str) -> str:
    """A command of this package, as a terminal of 100 columns shows it."""
    place = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100"}
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=True, env={**os.environ, **place}).stdout
