"""What the command prints. The work does not depend on it: if nobody reads the lines, or nothing more fits there, it goes on to its end."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path


class Lines:
    """Lines on standard output."""

    def __init__(self) -> None:
        self._error: OSError | None = None

    def say(self, line: object) -> None:
        if self._error is None and sys.stdout is not None:
            try:
                print(printable(str(line)), flush=True)
            except OSError as error:
                self._error = error
                give_up_output()

    def end(self, *places: Path) -> None:
        """An error if not all was printed; the places have the results."""
        if isinstance(self._error, BrokenPipeError):
            raise self._error
        if self._error is not None:
            where = " ".join(map(str, places))
            raise ValueError(f"standard output must take what is printed, got {self._error.strerror!r}; the results are in {where}")


def printable(line: str) -> str:
    """The line, with escapes for what the encoding of standard output does not have."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return line.encode(encoding, "backslashreplace").decode(encoding)


def complaint(line: str) -> None:
    """A line on standard error, where the progress is, if anything can be written there."""
    with suppress(OSError):
        if sys.stderr is not None:  # print would take standard output for it
            print(line, file=sys.stderr, flush=True)


def flush() -> None:
    """Standard output, now: at its end Python would only say that it ignored an error."""
    if sys.stdout is None:  # the command was started with it closed
        return
    try:
        sys.stdout.flush()
    except OSError:
        give_up_output()
        raise


def give_up_output() -> None:
    """What is left in the buffer of standard output goes nowhere."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
