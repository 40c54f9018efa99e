"""`shaped explore`: what it refuses, what it loads, and how it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from shaped import process
from shaped.commands import explore

COMMAND = [sys.executable, "-m", "shaped", "explore", "--no-browser"]


def test_a_port_in_use_is_one_line():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=rf"^port must be one that is free on 127.0.0.1, got {port} \(Address already in use\)"):
            explore.open_socket(port)
    with pytest.raises(ValueError, match=r"^port must be from 0 to 65535, got 65536$"):
        explore.open_socket(65536)


def test_without_the_server_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(process, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^explore needs starlette, uvicorn \(pip install .*\[explore\]'.*\)$"):
        explore.explore()


def test_it_listens_on_this_machine_alone():
    with explore.open_socket(0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


def test_the_server_loads_without_torch():
    script = "import sys; sys.argv = ['shaped', 'explore']; import shaped.commands.app, shaped.explore.server; print([*sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "'shaped.explore.server'" in done.stdout
    assert "'torch'" not in done.stdout


def test_a_question_is_answered_and_ctrl_c_is_one_line():
    """The whole command: the page, a preview of every panel by its workers, and nothing left."""
    process = subprocess.Popen(
        COMMAND,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().split()[2]
        with urllib.request.urlopen(address) as page:
            assert b"<html" in page.read()
        with urllib.request.urlopen(f"{address}answer?width=16&depth=4&tokens=2") as answer:
            lines = [json.loads(answer.readline()) for _ in range(5)]
            workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            assert [line["kind"] for line in lines] == ["question", *["panel"] * 4]
            assert all("chart" in line and line["stage"] == 0 for line in lines[1:])
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
        assert process.stderr.read() == "shaped: interrupted; no file is half-written\n"
    assert workers
    assert not any(is_running(int(pid)) for pid in workers)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
