"""Console output that survives a closed pipe or a full disk: the work goes on to its end, and the error comes after it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path


class Lines:
    """Lines on standard output. The first error is kept; later lines are dropped."""

    def __init__(self) -> None:
        self._error: OSError | None = None

    def say(self, line: object) -> None:
        if self._error is None and sys.stdout is not None:
            try:
                print(escape_unprintable(str(line)), flush=True)
            except OSError as error:
                self._error = error
                discard_output()

    def end(self, *places: Path) -> None:
        """Raises the error of `say`, if there was one. `places` hold the results."""
        if isinstance(self._error, BrokenPipeError):
            raise self._error
        if self._error is not None:
            where = " ".join(map(str, places))
            raise ValueError(f"standard output must take what is printed, got {self._error.strerror!r}; the results are in {where}")


def escape_unprintable(line: str) -> str:
    """The line, with escapes for characters that the encoding of standard output lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return line.encode(encoding, "backslashreplace").decode(encoding)


def print_error(line: str) -> None:
    """A line on standard error, beside the progress bar. Errors while writing are ignored."""
    with suppress(OSError):
        if sys.stderr is not None:  # with file=None, print would write to standard output
            print(line, file=sys.stderr, flush=True)


def flush() -> None:
    """Flushes standard output now. At exit Python would only report that it ignored an error."""
    if sys.stdout is None:  # the command was started with it closed
        return
    try:
        sys.stdout.flush()
    except OSError:
        discard_output()
        raise


def discard_output() -> None:
    """Sends the buffer of standard output, and all that follows, to the null device."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
