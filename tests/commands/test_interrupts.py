"""Ctrl-C while the command or the library loads."""

import signal
import subprocess
import sys


def hear_interrupts() -> None:
    """For a new process: tests that a shell runs in the background inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_while_it_loads_is_one_line():
    """The import of torch takes a second or two."""
    command = [sys.executable, "-X", "importtime", "-m", "shaped", "--version"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=hear_interrupts) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if " torch" in line:  # a part of it is there, so the command has begun to load
                break
        process.send_signal(signal.SIGINT)
        rest = [line for line in process.stderr if not line.startswith("import time:")]
    assert (process.returncode, rest) == (130, ["shaped: interrupted; no file is half-written\n"])


def test_ctrl_c_in_a_program_that_imports_the_library_is_its_own():
    """Also in one that is embedded, and has no arguments at all."""
    script = "import signal, sys; sys.argv = []; import shaped; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, preexec_fn=hear_interrupts)
    assert done.stdout == "True\n"
