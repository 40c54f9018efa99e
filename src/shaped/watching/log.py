"""watch.jsonl: one row or one alarm a line; and TensorBoard files where tensorboard is installed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shaped.files import append_lines, make_folder, read_steps, write_lines
from shaped.watching.alarms import Alarm
from shaped.watching.rows import Row

FILE = "watch.jsonl"


class WatchLog:
    """Appends to the file of a run. Lines from `start` on are dropped: those steps are computed again. So is a line that was cut off."""

    def __init__(self, folder: Path, start: int = 0, tensorboard: bool = True):
        make_folder(folder)
        self.path = folder / FILE
        lines = [line for line in read_steps(self.path) if line["step"] < start]
        self.rows = [Row.from_json(line) for line in lines if "kind" not in line]
        write_lines(self.path, lines)
        self._writer = open_writer(folder / "tensorboard", start) if tensorboard else None

    def write(self, row: Row, alarms: Iterable[Alarm]) -> None:
        self.rows.append(row)
        append_lines(self.path, (row.to_json(), *(alarm.to_json() for alarm in alarms)))
        if self._writer is not None:
            if row.loss is not None:
                self._writer.add_scalar("loss", row.loss, row.step)
            for name, values in row.quantities.items():
                for layer, value in values.items():
                    if math.isfinite(value):
                        self._writer.add_scalar(f"{name}/{layer}", value, row.step)
            for alarm in alarms:
                self._writer.add_text("alarm", str(alarm), row.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def open_writer(folder: Path, start: int) -> Any:
    """A writer of TensorBoard files; what earlier ones have from step `start` on is dropped. None where tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=start)
