"""One process at a time in a folder, or with a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shaped.files import make_folder


class Busy(ValueError):
    """Another process works in the folder."""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keeps other processes out of a folder. Creates the folder if it is missing, and removes it if it stays empty.

    The kernel holds the lock and releases it when the process ends, however it ends. A lock file left behind by a killed process locks
    nobody out.
    """
    made = not folder.exists()
    path = folder / ".lock"
    handle = _lock(path, folder)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is still ours
        os.close(handle)
        if made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Waits until no other process holds the lock of this file, which stays behind, empty."""
    import fcntl

    make_folder(path.parent)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with suppress(OSError):  # the file system has no locks: go on without one
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _lock(path: Path, folder: Path) -> int:
    """The handle of the locked file."""
    try:
        import fcntl  # here, so that Windows can import this module
    except ImportError:
        raise ValueError("training needs a POSIX system: Linux or macOS") from None
    while True:
        make_folder(folder)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # another process has just removed the folder that it created
            continue
        except OSError as error:
            raise ValueError(f"out must be a folder that can be written, got {folder}: {error.strerror}") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise Busy(f"out must be a folder in which no other process works, got {folder}, where one does") from None
        except OSError:  # the file system has no locks: go on without one
            return handle
        try:
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except FileNotFoundError:
            pass
        os.close(handle)  # the owner has just removed its lock file: what we locked no longer has that name
