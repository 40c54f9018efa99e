"""One process at a time in a folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shaped.files import make_folder


class Busy(ValueError):
    """Another process works in the folder."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keeps other processes out of a folder, which is made if need be, and removed if nothing was put into it.

    The lock is the kernel's and goes with the process, however that ends: a file that a killed one left behind locks nobody out.
    """
    made = not folder.exists()
    path = folder / ".lock"
    handle = _locked(path, folder)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is still ours
        os.close(handle)
        if made:
            with suppress(OSError):  # it has something in it
                folder.rmdir()


def _locked(path: Path, folder: Path) -> int:
    while True:
        make_folder(folder)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # whoever made the folder has just removed it
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise Busy(f"out must be a folder in which no other process works, got {folder}, where one does") from None
        except OSError:  # a file system without locks: better unguarded than of no use
            return handle
        try:
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except FileNotFoundError:
            pass
        os.close(handle)  # whoever had it has just finished and removed it: what was locked is no longer the file of that name
