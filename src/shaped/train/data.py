"""`shaped data prepare`: text → tokenizer → rows of tokens in memory-mapped arrays, with counts and hashes.

Text is streamed: memory does not grow with the corpus. What was written is recorded chunk by chunk, and a run that was interrupted goes on
where it stopped. A folder is complete once it has `data.json`.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shaped.checks import in_range, whole_number
from shaped.files import entries, read_json, write_json
from shaped.train.lock import alone
from shaped.train.text import Line, fingerprint, is_file, lines
from shaped.train.tokenizer import END, FIRST, SPECIAL, tokenizer_in

PARTS = ("train", "valid")
CHUNK, CHARACTERS = 20_000, 4_000_000
"""Lines that are tokenised, written and recorded at a time, and about how many characters of them at most: the tokenizer takes some
hundred bytes for each."""
STATE = {"lines": 0, "rows": 0, "rest": [], "documents": 0, "complete": False, "left_out": False}
"""How far the packing of an array has come."""


@dataclass(frozen=True)
class Data:
    """A prepared folder: rows of tokens, [rows, length]."""

    folder: Path
    facts: dict[str, Any]

    @property
    def vocab(self) -> int:
        return self.facts["vocab"]

    @property
    def length(self) -> int:
        return self.facts["length"]

    def rows(self, part: str) -> np.ndarray:
        """The array of "train" or "valid", memory-mapped; read into memory where there is only the file that `xz` made of it."""
        count, dtype, path = self.facts[part]["rows"], np.dtype(self.facts["dtype"]), self.folder / f"{part}.bin"
        if not count:
            raise ValueError(f"data must have rows of {part}, got none in {self.folder}: more text, or more of it held out")
        content = self._carried(part)
        size = len(content) if content is not None else path.stat().st_size if path.is_file() else 0
        wanted = count * self.length * dtype.itemsize
        if size != wanted:
            raise ValueError(f"data must have {path.name} of {wanted} bytes, got {size}: prepare {self.folder} again")
        shape = (count, self.length)
        rows = np.memmap(path, dtype, "r", shape=shape) if content is None else np.frombuffer(content, dtype).reshape(shape)
        if rows.max() >= self.vocab:
            raise ValueError(
                f"data must have tokens below vocab, {self.vocab}, got {rows.max()} in {path.name}: prepare {self.folder} again"
            )
        return rows

    def verify(self) -> None:
        """Reads everything and compares the hashes."""
        for part in PARTS:
            if not self.is_whole(part):
                raise ValueError(f"data must have the hashes of data.json, got another for {part}.bin: prepare {self.folder} again")

    def is_whole(self, part: str) -> bool:
        """Has the array the hash that was written down when it was made?"""
        path = self.folder / f"{part}.bin"
        try:
            content = self._carried(part)
        except ValueError:
            return False
        made = hashlib.sha256(content).hexdigest() if content is not None else _hash(path) if path.is_file() else ""
        return made == self.facts[part]["sha256"]

    def _carried(self, part: str) -> bytes | None:
        """An array of which there is only what `xz` made of it."""
        compressed = self.folder / f"{part}.bin.xz"
        return _decompressed(compressed) if compressed.is_file() and not (self.folder / f"{part}.bin").exists() else None


def load(folder: Path) -> Data:
    wrong = f"data must be a folder made by `shaped data prepare`, got {folder}"
    try:
        facts = read_json(folder / "data.json", vocab=int, length=int, dtype=str, special=dict, train=dict, valid=dict)
        for part in PARTS:
            entries(part, facts[part], rows=int, tokens=int, documents=int, sha256=str, stopped_at_limit=bool)
        entries("special", facts["special"], **dict.fromkeys(SPECIAL, int))
        whole_number("length", facts["length"], most=1 << 32)
        whole_number("vocab", facts["vocab"], least=max(facts["special"].values()) + 2, most=1 << 32)
        if facts["dtype"] not in ("uint16", "uint32"):
            raise ValueError(f"dtype must be uint16 or uint32, got {facts['dtype']!r}")
    except FileNotFoundError:
        raise ValueError(f"{wrong}, which has no data.json") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{wrong}, whose data.json is damaged: {error}") from None
    return Data(folder, facts)


def prepare(
    text: list[str],
    out: Path,
    *,
    valid: list[str] | None = None,
    vocab: int = 32_000,
    length: int = 128,
    valid_share: float = 0.01,
    cased: bool = False,
    tokens: int | None = None,
    progress: bool = True,
    say: Callable[[str], object] = print,
) -> Data:
    """Trains a tokenizer on the text and packs the text into rows. What the folder has already is not made again, unless it was damaged.

    Args:
        text, valid: sources (see `text.py`). Without `valid`, a share of the text's documents is held out.
        vocab, length: the tokenizer's entries and a row's tokens.
        valid_share: the share of documents that are held out, where there is no `valid`.
        cased: keep capitals and accents.
        tokens: stop after so many training tokens; what is left out is said in `data.json`.
    """
    if not text:
        raise ValueError("text must be at least one file or dataset, got none")
    whole_number("vocab", vocab, least=len(SPECIAL) + 1)
    whole_number("length", length, least=8)
    in_range("valid_share", valid_share, 0.0, 0.5)
    if tokens is not None:
        whole_number("tokens", tokens, least=length)
    request = {
        "text": [fingerprint(source) for source in text],
        "valid": [fingerprint(source) for source in valid or []],
        "vocab": vocab,
        "length": length,
        "valid_share": None if valid else valid_share,
        "cased": cased,
        "tokens": tokens,
    }
    with alone(out):
        if not _same_request(out, request):
            write_json(out / "request.json", request)
            try:
                return _make(out, request, {}, text, valid, progress)
            except ValueError:
                if not _has_begun(out):
                    (out / "request.json").unlink()
                raise
        whole = _whole_parts(out, say)
        return load(out) if len(whole) == len(PARTS) else _make(out, request, whole, text, valid, progress)


def _make(out: Path, request: dict[str, Any], whole: dict[str, Any], text: list[str], valid: list[str] | None, progress: bool) -> Data:
    """All but the parts that are whole, of which these are the facts."""
    vocab, length, valid_share, cased, tokens = (request[name] for name in ("vocab", "length", "valid_share", "cased", "tokens"))
    with _bar(progress) as bar:
        tokenizer = tokenizer_in(out, lambda: _training_text(text, valid, valid_share, bar("tokenizer", text)), vocab, length, cased)
        size = tokenizer.get_vocab_size()
        dtype = "uint16" if size <= 1 << 16 else "uint32"
        parts = {}
        for part, sources in zip(PARTS, (text, valid or text), strict=True):
            if part in whole:
                parts[part] = whole[part]
                continue
            stream = _parted(_all_lines(sources, bar(part, sources)), None if valid else (part == "valid", valid_share))
            parts[part] = _pack(stream, tokenizer, out / f"{part}.bin", length, dtype, tokens if part == "train" else None)
    if not all(parts[part]["rows"] for part in PARTS):
        _clear(out)  # the right request will be another one
        counts = " and ".join(f"{parts[part]['rows']} from {parts[part]['documents']} documents" for part in PARTS)
        raise ValueError(
            f"text must fill rows of {length} tokens to train on and to test with, got {counts}: "
            "more text, blank lines between its documents, more of them held out (valid_share), or a test text of its own (valid)"
        )
    facts = {"format": 1, "vocab": size, "length": length, "dtype": dtype, "special": {name: i for i, name in enumerate(SPECIAL)}}
    write_json(out / "data.json", facts | parts | {"request": request})
    for part in parts:
        _record(out / f"{part}.bin").unlink(missing_ok=True)
    return load(out)


def _whole_parts(out: Path, say: Callable[[str], object]) -> dict[str, Any]:
    """The facts of the arrays of a finished folder that are still what was written. The others are named, and removed to be made anew."""
    if not (out / "data.json").exists():
        return {}
    try:
        made = load(out)
    except ValueError as error:
        say(f"{error}; all arrays are made anew")
        return {}
    whole = {part: made.facts[part] for part in PARTS if made.is_whole(part)}
    for part in PARTS:
        if part not in whole and not _record(out / f"{part}.bin").exists():  # with a record it is being made anew since an earlier call
            say(f"{part}.bin in {out} is not what was written: it is made anew")
            for name in (f"{part}.bin", f"{part}.bin.xz"):
                (out / name).unlink(missing_ok=True)
    return whole


def _same_request(out: Path, request: dict[str, Any]) -> bool:
    """Was this folder begun with the same request? An error if it holds something else."""
    path = out / "request.json"
    if not path.exists() or not _has_begun(out):  # what was killed before it began is no claim
        return False
    try:
        before = read_json(path)
    except ValueError as error:
        raise ValueError(f"out must be a new folder or one of an earlier call, got {out}, which cannot be told: {error}") from None
    for key, value in request.items():
        if before.get(key) != value:
            raise ValueError(f"out must be a new folder or one prepared with the same {key}, {before.get(key)!r}, got {value!r} for {out}")
    return True


def _has_begun(out: Path) -> bool:
    return (out / "tokenizer").exists() or any(out.glob("*.bin*"))


def _clear(out: Path) -> None:
    """Removes what was made so far."""
    shutil.rmtree(out / "tokenizer")
    for part in PARTS:
        (out / f"{part}.bin").unlink()
        _record(out / f"{part}.bin").unlink(missing_ok=True)


def _training_text(text: list[str], valid: list[str] | None, share: float, advance: Callable[[int], object]) -> Iterator[str]:
    return (line for line in _parted(_all_lines(text, advance), None if valid else (False, share)) if line is not None)


def _all_lines(sources: list[str], advance: Callable[[int], object]) -> Iterator[Line]:
    return (line for source in sources for line in lines(source, advance))


def _parted(stream: Iterator[Line], hold_out: tuple[bool, float] | None) -> Iterator[Line]:
    """The documents that are held out, or the others: document i is held out when i·share passes a whole number."""
    if hold_out is None:
        yield from stream
        return
    wanted, share = hold_out
    document = 1
    for line in stream:
        held = int(document * share) > int((document - 1) * share)
        if held is wanted:
            yield line
        document += line is None


def _pack(stream: Iterator[Line], tokenizer: Any, path: Path, length: int, dtype: str, limit: int | None) -> dict[str, Any]:
    """Tokens in rows of `length`: `[CLS]`, then what comes next of the text, documents ended by `[SEP]`. Its counts and hash."""
    first, end = tokenizer.token_to_id(FIRST), tokenizer.token_to_id(END)
    record, row = _record(path), length * np.dtype(dtype).itemsize
    state = _recorded(record, path.stat().st_size // row if path.exists() else 0)
    most = None if limit is None else -(-limit // length)
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.truncate(state["rows"] * row)  # what a killed run wrote but did not record
        file.seek(0, os.SEEK_END)
        stream = islice(stream, state["lines"], None)
        while not state["complete"]:
            chunk = _chunk(stream)
            flat = _flat(chunk, tokenizer, state["rest"], end, dtype)
            rows = len(flat) // (length - 1)
            if most is not None and state["rows"] + rows >= most:
                rows = most - state["rows"]
                state["complete"] = state["left_out"] = True
            packed = np.full((rows, length), first, dtype)
            packed[:, 1:] = flat[: rows * (length - 1)].reshape(rows, length - 1)
            file.write(packed.tobytes())
            file.flush()
            os.fsync(file.fileno())
            state["rows"] += rows
            state["lines"] += len(chunk)
            state["documents"] += chunk.count(None)
            state["rest"] = flat[rows * (length - 1) :].tolist()
            state["complete"] |= not chunk
            write_json(record, state)
    counts = {"rows": state["rows"], "tokens": state["rows"] * length, "documents": state["documents"]}
    return counts | {"sha256": _hash(path), "stopped_at_limit": state["left_out"]}


def _recorded(record: Path, rows: int) -> dict[str, Any]:
    """Where to go on; at the beginning, where there are fewer rows than were recorded."""
    try:
        state = read_json(record, **{name: type(value) for name, value in STATE.items()})
    except (FileNotFoundError, ValueError):
        return dict(STATE)
    return state if state["rows"] <= rows else dict(STATE)


def _chunk(stream: Iterator[Line]) -> list[Line]:
    chunk, characters = [], 0
    for line in islice(stream, CHUNK):
        chunk.append(line)
        characters += len(line or "")
        if characters > CHARACTERS:
            break
    return chunk


def _flat(chunk: list[Line], tokenizer: Any, rest: list[int], end: int, dtype: str) -> np.ndarray:
    """The tokens of a chunk of lines, after what was left of the last one."""
    encoded = iter(tokenizer.encode_batch_fast([line for line in chunk if line is not None], add_special_tokens=False))
    return np.concatenate([np.asarray(rest, dtype), *(np.asarray([end] if line is None else next(encoded).ids, dtype) for line in chunk)])


@lru_cache(maxsize=2)
def _decompressed(path: Path) -> bytes:
    try:
        return lzma.decompress(path.read_bytes())
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"data must have {path.name} as xz made it, got one that is damaged in {path.parent}: {error}") from None


def _record(path: Path) -> Path:
    """How far the packing of an array has come; deleted when all is done."""
    return path.with_suffix(".json.part")


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _bar(wanted: bool) -> Iterator[Callable[[str, list[str]], Callable[[int], object]]]:
    """A progress bar a pass over the text, in bytes of the files read."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:>9}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not wanted) as progress:

        def task(name: str, sources: list[str]) -> Callable[[int], object]:
            sizes = [Path(source).stat().st_size if is_file(source) else None for source in sources]
            total = None if None in sizes else sum(size for size in sizes if size is not None)
            number = progress.add_task(name, total=total)
            return lambda size: progress.advance(number, size)

        yield task
