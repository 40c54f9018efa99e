"""Standard output that is closed, full, read by nobody, or knows few characters: the results are written all the same."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shaped.commands import app as cli
from shaped.figures.shared import laws

SMALL = ["simulate", "--samples", "50", "--width", "20", "--depth", "3", "--step", "0.05"]
Command = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """Runs `shaped` in a process of its own, with this descriptor as standard output; returns exit code and standard error."""
    ours, theirs = socket.socketpair()
    script, errors = str(Path(__file__).with_name("forked_commands.py")), tmp_path_factory.mktemp("errors") / "errors"

    def call(*arguments: str, out: int | None, cwd: Path, encoding: str = "utf-8") -> tuple[int, str]:
        with errors.open("w") as file:
            message = json.dumps({"arguments": arguments, "cwd": str(cwd), "encoding": encoding}).encode()
            socket.send_fds(ours, [message], [descriptor for descriptor in (out, file.fileno()) if descriptor is not None])
            status = int(ours.recv(100))
        return status, errors.read_text()

    with subprocess.Popen([sys.executable, script, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL):
        theirs.close()
        with ours:
            yield call


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("json", [[], ["--json"]], ids=["table", "json"])
@pytest.mark.parametrize(("name", "status"), [("pipe", 1), ("full", 2)])
def test_results_are_written_before_they_are_printed(command: Command, tmp_path, json, name, status):
    """To a pipe that nobody reads, and to a device that is full."""
    out = closed_pipe() if name == "pipe" else os.open("/dev/full", os.O_WRONLY)
    try:
        found = command(*SMALL, *json, out=out, cwd=tmp_path)
    finally:
        os.close(out)
    said = (
        ""
        if name == "pipe"
        else "shaped: standard output must take what is printed, got 'No space left on device'; the results are in out\n"
    )
    assert found == (status, said)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["simulate.json", "simulate.png"]


def test_a_pipe_that_closes_before_the_buffer_is_written(command: Command, tmp_path):
    """The version stays in the buffer until the command ends, so the error is not that of a line that is printed."""
    out = closed_pipe()
    try:
        assert command("--version", out=out, cwd=tmp_path) == (1, "")
    finally:
        os.close(out)


def test_figures_are_finished_though_nobody_reads_their_lines(monkeypatch, tmp_path):
    """Computed in this process: those that it would start by default load torch."""
    small = laws.Settings(n=16, d=12, samples=256)
    monkeypatch.setattr("shaped.figures.harness.reproduce.workers_by_default", lambda device: None)
    monkeypatch.setattr("shaped.figures.pages.fig7.settings", lambda scale: small)
    out = os.fdopen(closed_pipe(), "w")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["shaped", "reproduce", "fig7", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    out.close()
    assert left.value.code == 1
    assert (tmp_path / "report.html").exists()


def test_standard_output_may_be_closed(command: Command, tmp_path):
    assert command(*SMALL, out=None, cwd=tmp_path) == (0, "")
    assert (tmp_path / "out" / "simulate.json").exists()


def test_standard_output_may_know_few_characters(command: Command, tmp_path):
    """What it cannot show is escaped."""
    with (tmp_path / "shown").open("wb") as shown:
        assert command(*SMALL, "--out", "\u2297", out=shown.fileno(), cwd=tmp_path, encoding="ascii") == (0, "")
    assert (tmp_path / "\u2297" / "simulate.json").exists()
    assert "written: \\u2297/simulate.json" in (tmp_path / "shown").read_text()
