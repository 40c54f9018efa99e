"""What a run measures: one JSON object a line in metrics.jsonl, and TensorBoard files where tensorboard is installed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shaped.files import append_lines, check_entries, parse_json, read_json_lines, replace_non_finite, write_lines
from shaped.process import suggest_install
from shaped.watching.log import open_writer

LINES: dict[str, dict[str, Any]] = {
    "train": {"loss": float, "count": int},
    "test": {"loss": float},
    "layers": {"entropy": list},
    "watch": {"entropy_share": list},
    "alarm": {"alarm": str, "advice": str},
}
"""The kinds of lines, and the entries of each that tables and figures read."""


class Metrics:
    """Appends to a run's metrics. Lines after `step`, where the run is resumed, are dropped: those steps are computed again.

    `expected` is how many lines there were when the checkpoint of that step was written.
    """

    def __init__(self, folder: Path, step: int, tensorboard: bool, log: Callable[[str], object], expected: int = 0):
        self.path = folder / "metrics.jsonl"
        lines, wrong = read_json_lines(self.path, _parse_line)
        kept = [line for line in lines if line["step"] <= step]
        if wrong:
            log(f"{self.path} has {len(wrong)} {'line' if len(wrong) == 1 else 'lines'} that cannot be read: left out")
        elif len(kept) < expected:
            log(f"{self.path} has {len(kept)} of the {expected} lines that were written up to step {step}: the others are lost")
        self.count = len(kept)
        write_lines(self.path, map(_seal, kept))
        self._writer = open_writer(folder / "tensorboard", step + 1) if tensorboard else None
        if tensorboard and self._writer is None:
            log(f"no TensorBoard files: tensorboard is not installed ({suggest_install('train')})")

    def write(self, step: int, kind: str, **values: Any) -> None:
        append_lines(self.path, [_seal({"step": step, "kind": kind} | replace_non_finite(values))])
        self.count += 1
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, str):
                    self._writer.add_text(f"{kind}/{name}", value, step)
                if value is None or isinstance(value, str):
                    continue
                for layer, number in enumerate(value, 1) if isinstance(value, list) else ((None, value),):
                    group = "watch/" if kind == "watch" else ""
                    place = f"{kind}/{name}" if layer is None else f"{group}{name}/layer {layer}"
                    self._writer.add_scalar(place, number, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of a run's metrics, of one kind if it is given. A line that cannot be read is a ValueError."""
    lines, wrong = read_json_lines(path, _parse_line)
    for number, why in wrong.items():
        raise ValueError(f"{path} must have a measurement in each line, got line {number}: {why}")
    return [line for line in lines if kind in (None, line["kind"])]


def _parse_line(text: str) -> dict[str, Any]:
    """One line, checked and without its checksum. Older lines have no checksum."""
    line = check_entries("it", parse_json("it", text), step=int, kind=str)
    if CHECKSUM in line and line.pop(CHECKSUM) != _checksum(line):
        raise ValueError("its checksum is another")
    if line["kind"] not in LINES or line["step"] < 0:
        raise ValueError(f"it must have a step and one of the kinds {', '.join(LINES)}, got {line['step']} and {line['kind']!r:.20}")
    check_entries("it", line, **LINES[line["kind"]])
    for name, value in line.items():
        if isinstance(value, list) and not all(isinstance(entry, int | float | None) and not isinstance(entry, bool) for entry in value):
            raise ValueError(f"it must have numbers in {name}, got {value!r:.60}")
    if line.get("count", 1) < 1:
        raise ValueError(f"it must have a count of at least 1, got {line['count']}")
    return line


CHECKSUM = "crc32"


def _checksum(line: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(line).encode()):08x}"


def _seal(line: dict[str, Any]) -> dict[str, Any]:
    return line | {CHECKSUM: _checksum(line)}
