"""Folders, atomic writes, and readers that check what they read."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np

from shaped.process import to_line

LARGEST = 1 << 30  # bytes; larger text files are refused
SEAL = "seal"  # the entry of a JSON object that holds the hash of the other entries


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Around writes to an open file: their errors, as on a full disk, do not know its name."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Calls `write` with a temporary file and renames it to `path` when it is complete. An interrupted run leaves no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = _create_beside(path)
    try:
        with naming_file(path), os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # it has its name already if Ctrl-C came just after that
        raise


def _create_beside(path: Path) -> tuple[int, Path]:
    """A new empty file in the same folder, open for writing. Unlike those of mkstemp it has the usual mode: others can read it."""
    while True:
        name = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with suppress(FileExistsError):
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), name


def make_folder(path: Path, name: str = "out") -> None:
    """Creates the folder if it is missing. `name` is the argument that an error names."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{name} must be a folder, got {path}, which is a file or in one") from None
    except OSError as error:
        raise ValueError(f"{name} must be a folder that can be made, got {path}: {error.strerror}") from None


def check_writable(folder: Path, name: str = "out", files: Iterable[str] = ()) -> None:
    """Refuses a folder into which these files could not be written later: to be called before the work, not after it. Makes nothing.

    Of a folder that is not there yet, the nearest one above it is tried.
    """
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not there.is_dir():
        raise ValueError(f"{name} must be a folder, got {folder}, which is a file or in one")
    try:
        with TemporaryFile(dir=there):  # asks the file system: a mode does not tell of a read-only mount, nor what root may do
            pass
    except OSError as error:
        raise ValueError(f"{name} must be a folder that can be written, got {folder}: {error.strerror}") from None
    for file in files:
        if (folder / file).is_dir():  # no file can be renamed to it
            raise ValueError(f"{name} must be a folder into which {file} can be written, got {folder / file}, which is a folder")


def remove(path: Path) -> None:
    """Removes a file or a folder with its content, if there is one. Removes a link, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def set_usual_mode(path: Path) -> None:
    """Gives a file the mode of a newly created file: 0o666 without the umask.

    One is created to see its mode: `os.umask` tells the umask only by setting it, for every thread.
    """
    handle, other = _create_beside(path)
    mode = os.fstat(handle).st_mode
    os.close(handle)
    other.unlink()
    path.chmod(stat.S_IMODE(mode))


@contextmanager
def open_regular(path: Path) -> Iterator[io.BufferedReader]:
    """Opens a regular file for reading. Pipes and devices are refused: reading them may never end.

    Raises FileNotFoundError for a missing file and ValueError for one that cannot be opened.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without O_NONBLOCK this waits for the writer of a pipe
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise ValueError(f"{path} must be a file that can be read, got one that cannot: {getattr(error, 'strerror', error)}") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise ValueError(f"{path} must be a file, got a {'folder' if stat.S_ISDIR(mode) else 'pipe or device'}")
    with os.fdopen(handle, "rb") as file:
        yield file


def read_text(path: Path, errors: str = "strict") -> str:
    """The text of a regular file. Raises a ValueError if it is larger than LARGEST or no UTF-8."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST:
            raise ValueError(f"{path} must have at most {LARGEST} bytes, got {size}")
        content = file.read()
    try:
        return content.decode(errors=errors)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8, got byte 0x{content[error.start]:02x} at {error.start}") from None


def sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json(name: str, text: str) -> Any:
    """Parses strict JSON: refuses NaN, infinities and integers of more than 64 bits, which Python accepts."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_parse_float, parse_int=_parse_int)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be JSON, got what is not: {error}") from None


def read_json(path: Path, /, **kinds: Any) -> dict[str, Any]:
    """The JSON object in a file. Raises a ValueError if an entry of `kinds` is missing or has another type.

    Checks the hash if `write_sealed` wrote the file. The seal is not returned.
    """
    value = check_entries(str(path), parse_json(str(path), read_text(path)))
    return check_entries(str(path), _check_seal(path, value) if SEAL in value else value, **kinds)


def read_sealed(path: Path, /, **kinds: Any) -> dict[str, Any]:
    """Like `read_json`, but refuses a file without a seal."""
    value = check_entries(str(path), parse_json(str(path), read_text(path)))
    if SEAL not in value:
        raise ValueError(f"{path} must have the entry {SEAL!r} that it was written with, got none")
    return check_entries(str(path), _check_seal(path, value), **kinds)


def check_entries(name: str, value: Any, /, **kinds: Any) -> dict[str, Any]:
    """The value, if it is an object with entries of these types. An int is accepted for float; a bool is not a number."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {value!r:.60}")
    for key, kind in kinds.items():
        found, wanted = value.get(key), int | float if kind is float else kind
        if not isinstance(found, wanted) or (isinstance(found, bool) and kind is not bool):
            raise ValueError(f"{name} must have {key} ({getattr(kind, '__name__', kind)}), got {found!r:.60}")
    return value


def read_json_lines(path: Path, parse: Callable[[str], dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The lines that `parse` accepts, and what its ValueError says of the others, by line number. No file has no lines."""
    try:
        content = read_text(path, errors="replace")
    except FileNotFoundError:
        return [], {}
    lines, wrong = [], {}
    for number, text in enumerate(content.removesuffix("\n").split("\n") if content else (), 1):
        try:
            lines.append(parse(text))
        except ValueError as error:
            wrong[number] = str(error)
    return lines, wrong


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The JSON objects, a line each, with a whole number "step", up to the first that is none: a killed run may have cut off the last."""
    lines, wrong = read_json_lines(path, lambda text: check_entries("it", parse_json("it", text), step=int))
    return lines[: min(wrong) - 1] if wrong else lines


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """JSON objects, a line each, in place of what the file had."""
    content = _format_lines(lines)
    write_atomically(path, lambda file: file.write(content))


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """All of them or none, in one write: another process may read the file.

    A device that is full takes only a part, without an error. What was written of it is then taken back, so that later lines are whole.
    """
    content = _format_lines(lines)
    with naming_file(path), open(path, "ab", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        try:
            written = file.write(content)
            while written < len(content):  # the next write says why
                written += file.write(content[written:])
        except BaseException:
            file.truncate(end)
            raise


def _format_lines(lines: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()


def replace_non_finite(value: Any) -> Any:
    """None for numbers that are not finite, which JSON does not have; also inside of objects and lists."""
    if isinstance(value, dict):
        return {key: replace_non_finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, lambda file: file.write((json.dumps(value, indent=1, allow_nan=False) + "\n").encode()))


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Writes an object with its hash, so that `read_json` detects damage."""
    plain = json.loads(json.dumps(value, allow_nan=False))
    write_json(path, plain | {SEAL: _hash(plain)})


def _check_seal(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    """The entries without the seal. Raises a ValueError if the seal is not their hash."""
    others = {key: entry for key, entry in value.items() if key != SEAL}
    if value[SEAL] != _hash(others):
        raise ValueError(f"{path} must be as it was written, got another content than its seal says")
    return others


def _hash(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _parse_float(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(f"{text:.40}")


def _parse_int(text: str) -> int:
    number = int(text)
    if number.bit_length() > 63:
        raise ValueError(f"a whole number must have at most 64 bits, got {text:.40}")
    return number


def read_array(path: Path, name: str, most: int) -> np.ndarray:
    """The array in a .npy file, with at most `most` numbers. `name` is the argument that an error names."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > 16 * most + 4096:
                raise ValueError(f"it has {size} bytes, more than {most} numbers take")
            array = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        said = to_line(getattr(error, "strerror", None) or error)[:120]
        raise ValueError(f"{name} must be an array in a .npy file, got {path}: {said}") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "bfiu":
        raise ValueError(f"{name} must be an array of numbers or booleans, got another content in {path}")
    return array
