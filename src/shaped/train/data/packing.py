"""Lines of text → rows of tokens in a file, chunk by chunk. After each chunk a progress file records the state to resume from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shaped.files import naming_file, open_regular, read_json, remove, write_sealed
from shaped.train.data.text import Line
from shaped.train.data.tokenizer import END, FIRST

CHUNK, CHARACTERS = 20_000, 4_000_000
"""Lines that are tokenised, written and recorded at a time, and about how many characters of them at most: the tokenizer takes some
hundred bytes for each."""
STATE = {"lines": 0, "rows": 0, "rest": [], "documents": 0, "complete": False, "left_out": False, "sha256": hashlib.sha256().hexdigest()}
STATE |= {"bytes": 0, "rest_bytes": 0}
"""How far the packing of an array has come, the hash of its rows so far, and the bytes of their text and of the rest's."""


def pack_rows(stream: Iterator[Line], tokenizer: Any, path: Path, length: int, dtype: str, limit: int | None) -> dict[str, Any]:
    """Writes rows of `length` tokens: `[CLS]`, then the next tokens of the text, `[SEP]` after each document. Returns counts and hash."""
    first, end = tokenizer.token_to_id(FIRST), tokenizer.token_to_id(END)
    progress, row = progress_file(path), length * np.dtype(dtype).itemsize
    if path.is_symlink() or not path.is_file():  # the target of a link is not ours to write
        remove(path)
    state, digest = _read_progress(progress, path, row)
    most = None if limit is None else -(-limit // length)
    with naming_file(path), open(path, "r+b" if path.exists() else "wb") as file:
        file.truncate(state["rows"] * row)  # what a killed run wrote but did not record
        file.seek(0, os.SEEK_END)
        stream = islice(stream, state["lines"], None)
        while not state["complete"]:
            chunk = _read_chunk(stream)
            flat = _tokenise(chunk, tokenizer, state["rest"], end, dtype)
            rows = len(flat) // (length - 1)
            if most is not None and state["rows"] + rows >= most:
                rows = most - state["rows"]
                state["complete"] = state["left_out"] = True
            rest = flat[rows * (length - 1) :]
            rest_bytes = _count_rest(chunk, tokenizer, len(rest), state)
            packed = np.full((rows, length), first, dtype)
            packed[:, 1:] = flat[: rows * (length - 1)].reshape(rows, length - 1)
            file.write(packed.tobytes())
            digest.update(packed.tobytes())
            file.flush()
            os.fsync(file.fileno())
            state["rows"] += rows
            state["lines"] += len(chunk)
            state["documents"] += chunk.count(None)
            state["bytes"] += state["rest_bytes"] + sum(map(_count_bytes, chunk)) - rest_bytes
            state["rest"], state["rest_bytes"] = rest.tolist(), rest_bytes
            state["complete"] |= not chunk
            state["sha256"] = digest.hexdigest()
            write_sealed(progress, state)
    counts = {name: state[name] for name in ("rows", "documents", "bytes")} | {"tokens": state["rows"] * length}
    return counts | {"sha256": digest.hexdigest(), "stopped_at_limit": state["left_out"]}


def _read_progress(progress: Path, path: Path, row: int) -> tuple[dict[str, Any], Any]:
    """The state to resume from and the hash so far; the initial ones if the rows in the file are not those that were recorded."""
    try:
        state = read_json(progress, **{name: type(value) for name, value in STATE.items()})
        with open_regular(path) as file:
            digest = hashlib.sha256()
            left = state["rows"] * row
            while part := file.read(min(left, 1 << 20)):
                digest.update(part)
                left -= len(part)
        if digest.hexdigest() == state["sha256"]:
            return state, digest
    except (FileNotFoundError, ValueError):
        pass
    return dict(STATE), hashlib.sha256()


def _read_chunk(stream: Iterator[Line]) -> list[Line]:
    chunk, characters = [], 0
    for line in islice(stream, CHUNK):
        chunk.append(line)
        characters += len(line or "")
        if characters > CHARACTERS:
            break
    return chunk


def _tokenise(chunk: list[Line], tokenizer: Any, rest: list[int], end: int, dtype: str) -> np.ndarray:
    """The tokens of a chunk of lines, after the `rest` of the last chunk."""
    encoded = iter(tokenizer.encode_batch_fast([line for line in chunk if line is not None], add_special_tokens=False))
    return np.concatenate([np.asarray(rest, dtype), *(np.asarray([end] if line is None else next(encoded).ids, dtype) for line in chunk)])


def _count_bytes(line: Line) -> int:
    """The bytes of the original text, in UTF-8, and of the line end after it. The blank line that ends a document has one byte."""
    return 1 if line is None else len(line.encode()) + 1


def _count_rest(chunk: list[Line], tokenizer: Any, tokens: int, state: dict[str, Any]) -> int:
    """The bytes of the last `tokens` tokens of a chunk. The chunk comes after the rest of `state`, to which the tokens may reach back.

    The line that is cut is cut after the text of its last token in a row. Tokenizers say where that is in the original text, before they
    lower its case.
    """
    total = 0
    for line in reversed(chunk):
        if tokens <= 0:
            return total
        if line is None:
            tokens, total = tokens - 1, total + 1
            continue
        encoded = tokenizer.encode(line, add_special_tokens=False)
        if len(encoded.ids) > tokens:
            last = encoded.offsets[len(encoded.ids) - tokens - 1][1]
            return total + _count_bytes(line[last:])
        tokens, total = tokens - len(encoded.ids), total + _count_bytes(line)
    return total + (state["rest_bytes"] if tokens > 0 else 0)


def progress_file(path: Path) -> Path:
    """Beside an array or a tokenizer: how far it has come. Deleted when the folder is complete."""
    return path.with_suffix(".json.part")
