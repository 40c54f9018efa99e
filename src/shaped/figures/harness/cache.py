"""Cache of computed pages on disk, with one reader for each kind of file.

The arrays are in an .npz. Everything else, the summary, is in a .json, written last: it holds the hash of the arrays and a seal, its own
hash. The .png holds the hash of the arrays that it shows, and a text that says what is seen. A reader returns what was saved, or raises a
ValueError of one line.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shaped.figures.harness.claims import HOLDS, RELATIONS, verdict
from shaped.figures.harness.page import Result
from shaped.files import check_entries, open_regular, read_sealed, write_atomically, write_sealed

TEXTS = ("figure", "title", "shows", "version", "code", "scale", "device", "arrays_sha256")
FIELDS = dict.fromkeys(TEXTS, str) | {"seed": int, "settings": dict, "seconds": float, "claims": list, "table": dict}
CLAIM = {"id": str, "claim": str, "value": float, "interval": list, "relation": str, "threshold": float, "verdict": str}
PNG, SHOWN, SEEN = b"\x89PNG\r\n\x1a\n", "arrays_sha256", "Description"  # the last is the standard's word


@dataclass(frozen=True)
class Saved:
    summary: dict[str, Any]
    arrays: dict[str, np.ndarray]


@dataclass(frozen=True)
class Picture:
    png: bytes
    seen: str
    """What is seen, for those who do not see it. Empty in pictures of an earlier version."""
    width: int
    height: int


def save(folder: Path, id: str, key: dict[str, Any], result: Result, seconds: float) -> Saved:
    """Writes the arrays, then the summary with their hash. A run that is interrupted between the two leaves nothing that `load` accepts."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **result.arrays)
    data = buffer.getvalue()
    about = {"seconds": seconds, "claims": result.claims, "table": result.table, "arrays_sha256": hashlib.sha256(data).hexdigest()}
    summary = json.loads(json.dumps(key | about))
    write_atomically(folder / f"{id}.npz", lambda file: file.write(data))
    write_sealed(folder / f"{id}.json", summary)
    return Saved(summary, result.arrays)


def load(folder: Path, id: str, key: dict[str, Any]) -> Saved | None:
    """What was saved under this key; None if nothing was, or if it was saved under another key."""
    path = folder / f"{id}.json"
    if not os.path.lexists(path):
        return None
    summary = read_summary(path)
    if any(summary.get(name) != value for name, value in json.loads(json.dumps(key)).items()):
        return None
    return Saved(summary, read_arrays(folder / f"{id}.npz", summary))


def read_summary(path: Path) -> dict[str, Any]:
    """Reads the .json of a page and checks it: it has the right entries and types, and every verdict follows from its numbers."""
    try:
        name, summary = path.name, read_sealed(path, **FIELDS)
    except FileNotFoundError:
        raise ValueError(f"{path.name} must be beside the figure's other files, got none") from None
    for entry in sorted(summary.keys() - FIELDS.keys() - {"tokens"}):
        raise ValueError(f"{name} must have the entries of a figure, got {entry!r:.60}")
    if summary["figure"] != path.stem:
        raise ValueError(f"{name} must be of the figure {path.stem}, got {summary['figure']!r:.60}")
    _check_tokens(name, summary)
    for row in summary["claims"]:
        _check_claim(f"a claim in {name}", row)
    ids = [row["id"] for row in summary["claims"]]
    for twice in (id for id in ids if ids.count(id) > 1):  # one would hide the other in a table
        raise ValueError(f"{name} must have claims with ids of their own, got {twice!r:.60} twice")
    if summary["table"]:
        _check_table(f"the table in {name}", summary["table"])
    return summary


def _check_tokens(name: str, value: dict[str, Any]) -> None:
    if "tokens" not in value:
        raise ValueError(f"{name} must have tokens (int or null), got none")
    if value["tokens"] is not None:  # a page of training runs has no number of tokens
        check_entries(name, value, tokens=int)


def _check_claim(name: str, row: Any) -> None:
    check_entries(name, row, **CLAIM)
    _check_tokens(name, row)
    ends = row["interval"]
    if len(ends) != 2 or not all(end is None or _is_number(end) for end in ends):
        raise ValueError(f"{name} must have an interval of two numbers, got {ends!r:.60}")
    if row["relation"] not in RELATIONS:
        raise ValueError(f"{name} must have a relation among {', '.join(RELATIONS)}, got {row['relation']!r:.60}")
    expected = verdict(ends, row["relation"], row["threshold"])
    if row["verdict"] != expected:
        raise ValueError(f"{name} must have the verdict {expected!r}, as its interval and threshold say, got {row['verdict']!r:.60}")
    if expected != HOLDS:
        check_entries(name, row, reason=str)


def _check_table(name: str, table: dict[str, Any]) -> None:
    check_entries(name, table, columns=list, rows=list)
    for line in ([*table["columns"]], *table["rows"]):
        if not isinstance(line, list) or len(line) != len(table["columns"]):
            raise ValueError(f"{name} must have rows of {len(table['columns'])} cells, got {line!r:.60}")
        if not all(cell is None or isinstance(cell, str) or _is_number(cell) for cell in line):
            raise ValueError(f"{name} must have texts and numbers in its cells, got {line!r:.60}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_bytes(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except FileNotFoundError:
        return b""


def read_arrays(path: Path, summary: dict[str, Any]) -> dict[str, np.ndarray]:
    """Reads the .npz that was saved with this summary."""
    data = _read_bytes(path)
    if hashlib.sha256(data).hexdigest() != summary["arrays_sha256"]:
        raise ValueError(f"{path.name} must be the arrays that {path.stem}.json was saved with, got {'others' if data else 'none'}")
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception as error:  # zip, deflate and npy readers raise a dozen kinds of errors
        raise ValueError(f"{path.name} must be arrays, got what numpy cannot read ({type(error).__name__})") from None


def read_picture(path: Path, summary: dict[str, Any]) -> Picture:
    """Reads the .png and checks that it was drawn from this summary's arrays."""
    data = _read_bytes(path)
    chunks = list(_read_chunks(path.name, data))
    texts = dict(filter(None, (_read_text(*chunk) for chunk in chunks)))
    if texts.get(SHOWN) != summary["arrays_sha256"]:
        raise ValueError(f"{path.name} must be drawn from the arrays of {path.stem}.json, got another picture")
    width, height = (int.from_bytes(chunks[0][1][at : at + 4]) for at in (0, 4))  # the first chunk of a PNG is its header
    return Picture(data, texts.get(SEEN, ""), width, height)


def _read_text(kind: bytes, content: bytes) -> tuple[str, str] | None:
    """Keyword and text of a text chunk, Latin or international and not compressed; None for other chunks."""
    keyword, _, text = content.partition(b"\0")
    if kind == b"iTXt" and text[:2] == b"\0\0":
        text, encoding = text.split(b"\0", 4)[-1], "utf-8"  # after compression (two bytes), language and translated keyword
    elif kind == b"tEXt":
        encoding = "latin-1"
    else:
        return None
    return keyword.decode("latin-1"), text.decode(encoding, "replace")


def _read_chunks(name: str, data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Type and content of the chunks of a PNG. Their checksums must be right, and nothing may follow the last."""
    at, kind = len(PNG), b""
    whole = data.startswith(PNG)
    while whole and at < len(data) and kind != b"IEND":
        end = at + 8 + int.from_bytes(data[at : at + 4])
        kind, whole = data[at + 4 : at + 8], zlib.crc32(data[at + 4 : end]) == int.from_bytes(data[end : end + 4]) and end + 4 <= len(data)
        if whole:
            yield kind, data[at + 8 : end]
        at = end + 4
    if not whole or at != len(data) or kind != b"IEND":
        raise ValueError(f"{name} must be a whole PNG, got what is not")
