"""A command in the tests' own process: a new one would load torch, for seconds."""

import sys
from collections.abc import Callable

import pytest

from shaped.commands import app


def make_runner(*command: str) -> Callable[..., int]:
    """A function that calls `shaped` with this command and more arguments, and returns its exit status."""

    def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["shaped", *command, *arguments])
        with pytest.raises(SystemExit) as left:
            app.main()
        return left.value.code or 0  # pyright: ignore[reportReturnType] (an int, as main leaves it)

    return run
