"""`shaped explore`: a page in the browser that answers while sliders move."""

from __future__ import annotations

import os
import socket
import threading
import webbrowser
from typing import Annotated

import typer

from shaped.commands.options import WORK
from shaped.process import count_cores, require

ADDRESS = "127.0.0.1"
MOST_WORKERS = 2
"""More would not make one page faster."""


def explore(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.", rich_help_panel=WORK)] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.", rich_help_panel=WORK)] = True,
) -> None:
    """Open a local page with sliders: correlation, eigenvalues, gradients, entropy and the safe region, SDE against networks."""
    require("explore", "explore", "starlette", "uvicorn")
    listening = open_socket(port)
    port = listening.getsockname()[1]
    address = f"http://{ADDRESS}:{port}/"
    print(f"shaped explore: {address}  (Ctrl-C ends it)", flush=True)
    if browser:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    serve(listening, port)


def open_socket(port: int) -> socket.socket:
    """Listens at once: a browser that comes before the server is loaded waits."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be from 0 to 65535, got {port}")
    listening = socket.socket()
    if os.name == "posix":  # the port of a command that has just ended; on Windows it would take the port of one that runs
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((ADDRESS, port))
        listening.listen(64)
    except OSError as error:
        listening.close()
        raise ValueError(f"port must be one that is free on {ADDRESS}, got {port} ({error.strerror}); leave it out for any") from None
    return listening


def serve(listening: socket.socket, port: int) -> None:
    from shaped.explore.server import Server

    Server(port, min(MOST_WORKERS, count_cores())).run(sockets=[listening])
