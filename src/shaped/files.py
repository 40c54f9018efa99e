"""Folders, writing files whole or not at all, and reading JSON that may be anything."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Calls `write` with an open file that becomes `path` only once it is complete; an interrupted run leaves nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        usual_mode(Path(name))  # mkstemp makes files that only their owner can read
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def make_folder(path: Path, name: str = "out") -> None:
    """Makes the folder that an argument of this name asks for, unless there is one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{name} must be a folder, got {path}, which is a file or in one") from None


def usual_mode(path: Path) -> None:
    """Who may read and write a file is as with any new one."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def read_json(path: Path, **kinds: Any) -> dict[str, Any]:
    """The object in a file, with at least these entries of these types; a ValueError of one line says what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bytes that are no text are a ValueError too
        raise ValueError(f"{path.name} must be JSON, got what is not: {error}") from None
    return entries(path.name, value, **kinds)


def entries(name: str, value: Any, **kinds: Any) -> dict[str, Any]:
    """The value, if it is an object with these entries of these types. A whole number is a number; true and false are none."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {value!r:.60}")
    for key, kind in kinds.items():
        found, wanted = value.get(key), int | float if kind is float else kind
        if not isinstance(found, wanted) or (isinstance(found, bool) and kind is not bool):
            raise ValueError(f"{name} must have {key} ({kind.__name__}), got {found!r:.60}")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, lambda file: file.write((json.dumps(value, indent=1, allow_nan=False) + "\n").encode()))


def read_array(path: Path, name: str, most: int) -> np.ndarray:
    """The array of at most so many numbers in a .npy file that the argument of this name asks for."""
    try:
        size = path.stat().st_size
        if size > 16 * most + 4096:
            raise ValueError(f"it has {size} bytes, more than {most} numbers take")
        with path.open("rb") as file:
            array = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        said = " ".join(str(getattr(error, "strerror", None) or error).split())[:120]
        raise ValueError(f"{name} must be an array in a .npy file, got {path}: {said}") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "bfiu":
        raise ValueError(f"{name} must be an array of numbers or booleans, got another content in {path}")
    return array
