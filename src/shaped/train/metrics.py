"""What a run measures: one JSON object a line in metrics.jsonl, and TensorBoard files where tensorboard is installed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shaped.files import entries, write_atomically


class Metrics:
    """Appends to a run's metrics. What a killed run wrote after the step that is resumed from is dropped: those steps come again."""

    def __init__(self, folder: Path, step: int, tensorboard: bool, say: Callable[[str], None]):
        self.path = folder / "metrics.jsonl"
        lines, wrong = _lines(self.path)
        if wrong:
            say(f"{self.path} has {wrong} {'line' if wrong == 1 else 'lines'} that cannot be read: left out")
        kept = [line for line in lines if line["step"] <= step]
        write_atomically(self.path, lambda file: file.write("".join(json.dumps(line) + "\n" for line in kept).encode()))
        self._writer = _writer(folder / "tensorboard", step, say) if tensorboard else None

    def write(self, step: int, kind: str, **values: Any) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "kind": kind} | _plain(values)) + "\n")
        if self._writer is not None:
            for name, value in values.items():
                for layer, number in enumerate(value, 1) if isinstance(value, list) else ((None, value),):
                    place = f"{kind}/{name}" if layer is None else f"{name}/layer {layer}"
                    self._writer.add_scalar(place, number, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def read(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of a run's metrics, of one kind if it is given; without those that were cut off or are none."""
    return [line for line in _lines(path)[0] if kind in (None, line["kind"])]


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines that are some, and how many are none."""
    lines, wrong = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            lines.append(entries("line", json.loads(line), step=int, kind=str))
        except (ValueError, RecursionError):
            wrong += 1
    return lines, wrong


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _writer(folder: Path, step: int, say: Callable[[str], None]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        say("no TensorBoard files: tensorboard is not installed (pip install 'shaped-transformer[train]')")
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
