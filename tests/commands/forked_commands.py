"""A process that loads the command once and then forks for each call of it: a new process would load torch each time, for seconds.

A call is a JSON object, {"arguments": […], "cwd": …, "encoding": …}, with the child's standard output and error: descriptors, of which the
first is missing where standard output is closed. The child runs `python -m shaped` and ends as any Python does.
"""

import io
import json
import os
import runpy
import socket
import sys

from matplotlib.figure import Figure

import shaped.commands.app  # noqa: F401  loaded for the children, which use it


def wait_for_call(connection: socket.socket) -> tuple[dict, list[int]]:
    """Returns in a child, once for each call; the parent answers with the child's exit code, and ends when nobody calls any more."""
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, 1 << 16, 2)
        if not message:
            sys.exit()
        child = os.fork()
        if child == 0:
            return json.loads(message), descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


Figure().savefig(io.BytesIO())  # loads what drawing needs
call, (*out, errors) = wait_for_call(socket.socket(fileno=int(sys.argv[1])))
os.dup2(errors, 2)
if out:
    os.dup2(out[0], 1)
    sys.stdout = os.fdopen(1, "w", encoding=call["encoding"], closefd=False)
else:
    os.close(1)
    sys.stdout = None  # as Python has it when it starts so
os.chdir(call["cwd"])
sys.argv = ["shaped", *call["arguments"]]
runpy.run_module("shaped", run_name="__main__", alter_sys=True)
