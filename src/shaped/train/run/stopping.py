"""Why a run ends before its last step: it diverged, its time is over, someone interrupted it, or it was about to die."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Diverged(ArithmeticError):
    """A loss or a gradient is not finite."""


class Stopped(Exception):
    """The time was over, or someone interrupted. There is a checkpoint, if checkpoints are kept."""


class Alarmed(Stopped):
    """There was an alarm, and the settings say that a run stops then."""


class StopRequest:
    """Asks a run to stop at the next end of a chunk, where a checkpoint is of one step."""

    def __init__(self, minutes: float | None, began: float):
        self._minutes, self._began = minutes, began
        self.interrupted = False
        self.alarm = ""
        """What the watcher said, if the run is to stop for it."""

    @property
    def is_due(self) -> bool:
        late = self._minutes is not None and time.monotonic() - self._began > 60 * self._minutes
        return late or self.interrupted or bool(self.alarm)

    @property
    def why(self) -> str:
        return "interrupted" if self.interrupted else f"stopped by an alarm ({self.alarm})" if self.alarm else "the time is over"


@contextmanager
def catch_interrupts(request: StopRequest) -> Iterator[None]:
    """Turns Ctrl-C and SIGTERM into a stop request. A second signal interrupts at once."""

    def handle(number: int, frame: Any) -> None:
        if request.interrupted:
            raise KeyboardInterrupt
        request.interrupted = True

    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
