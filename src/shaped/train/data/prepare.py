"""`shaped data prepare`: text → tokenizer → rows of tokens in memory-mapped arrays, with counts and hashes.

Text is streamed: memory does not grow with the corpus. What was written is recorded chunk by chunk, and a run that was interrupted goes on
where it stopped. A folder is complete once it has `data.json`.
"""

from __future__ import annotations

import hashlib
import lzma
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shaped.checks import in_range, whole_number
from shaped.files import entries, open_regular, read_json, remove, sha256, write_sealed
from shaped.train.data.text import Line, fingerprint, is_file, lines
from shaped.train.data.tokenizer import END, FIRST, SPECIAL, changed, fault_of, hashes_of, load_tokenizer, make_tokenizer
from shaped.train.folder_lock import alone

PARTS = ("train", "valid")
CHUNK, CHARACTERS = 20_000, 4_000_000
"""Lines that are tokenised, written and recorded at a time, and about how many characters of them at most: the tokenizer takes some
hundred bytes for each."""
STATE = {"lines": 0, "rows": 0, "rest": [], "documents": 0, "complete": False, "left_out": False, "sha256": hashlib.sha256().hexdigest()}
"""How far the packing of an array has come, and the hash of its rows so far."""
IDS = {name: i for i, name in enumerate(SPECIAL)}


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

    def verify(self, tokenizer: bool = True) -> None:
        """Reads everything and compares the hashes; without the tokenizer, if it is not needed and not there."""
        for part in PARTS:
            if not self.is_whole(part):
                raise ValueError(f"data must have the hashes of data.json, got another for {part}.bin: prepare {self.folder} again")
        fault = self.fault_of_tokenizer()
        if fault and (tokenizer or fault != "none"):
            raise ValueError(f"data must have the tokenizer of data.json, got {fault}: prepare {self.folder} again")

    def tokenizer_files(self) -> dict[str, str]:
        """The hashes of the tokenizer's files, without what is beside them; older folders do not say which those are."""
        recorded = self.facts.get("tokenizer", {})
        return {name: made for name, made in hashes_of(self.folder / "tokenizer").items() if not recorded or name in recorded}

    def fault_of_tokenizer(self) -> str:
        return fault_of(self.folder / "tokenizer", self.facts.get("tokenizer", {}), self.vocab)

    def is_whole(self, part: str) -> bool:
        """Has the array the hash that was written down when it was made?"""
        path = self.folder / f"{part}.bin"
        try:
            content = self._carried(part)
            made = hashlib.sha256(content).hexdigest() if content is not None else sha256(path)
        except (OSError, ValueError):
            return False
        return made == self.facts[part]["sha256"]

    def _carried(self, part: str) -> bytes | None:
        """An array of which there is only what `xz` made of it."""
        compressed, size = self.folder / f"{part}.bin.xz", self.facts[part]["tokens"] * np.dtype(self.facts["dtype"]).itemsize
        if not compressed.is_file() or (self.folder / f"{part}.bin").exists():
            return None
        about = compressed.stat()
        return _decompressed(compressed, size, about.st_size, about.st_mtime_ns)


def load(folder: Path) -> Data:
    wrong = f"data must be a folder made by `shaped data prepare`, got {folder}"
    try:
        facts = read_json(folder / "data.json", vocab=int, length=int, dtype=str, special=dict, train=dict, valid=dict)
        for part in PARTS:
            about = entries(part, facts[part], rows=int, tokens=int, documents=int, sha256=str, stopped_at_limit=bool)
            if about["rows"] < 0 or about["tokens"] != about["rows"] * facts["length"]:
                raise ValueError(f"{part} must have rows of {facts['length']} tokens, got {about['tokens']} in {about['rows']} rows")
        entries("special", facts["special"], **dict.fromkeys(SPECIAL, int))
        if facts["special"] != IDS:
            raise ValueError(f"special must be {IDS}, got {facts['special']}")
        hashes = entries("tokenizer", facts.get("tokenizer", {}))  # older folders have none
        entries("tokenizer", hashes, **dict.fromkeys(hashes, str))
        whole_number("length", facts["length"], most=1 << 32)
        whole_number("vocab", facts["vocab"], least=len(SPECIAL) + 1, most=1 << 32)
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
            write_sealed(out / "request.json", request)
            try:
                return _make(out, request, {}, text, valid, progress)
            except ValueError:
                if not _has_begun(out):
                    (out / "request.json").unlink()
                raise
        whole = _whole_parts(out, say)
        return load(out) if len(whole) == len(PARTS) + 1 else _make(out, request, whole, text, valid, progress)


def _make(out: Path, request: dict[str, Any], whole: dict[str, Any], text: list[str], valid: list[str] | None, progress: bool) -> Data:
    """All but what is whole: the parts, and the hashes of the tokenizer."""
    vocab, length, valid_share, cased, tokens = (request[name] for name in ("vocab", "length", "valid_share", "cased", "tokens"))
    folder = out / "tokenizer"
    with _bar(progress) as bar:
        if "tokenizer" not in whole:
            make_tokenizer(folder, lambda: _training_text(text, valid, valid_share, bar("tokenizer", text)), vocab, length, cased)
            whole = whole | {"tokenizer": hashes_of(folder)}
            write_sealed(_record(folder), {"files": whole["tokenizer"]})
        tokenizer = load_tokenizer(folder)
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
    facts = {"format": 1, "vocab": size, "length": length, "dtype": dtype, "special": IDS, "tokenizer": whole["tokenizer"]}
    write_sealed(out / "data.json", facts | parts | {"request": request})
    for name in ("tokenizer", *(f"{part}.bin" for part in parts)):
        _record(out / name).unlink(missing_ok=True)
    return load(out)


def _whole_parts(out: Path, say: Callable[[str], object]) -> dict[str, Any]:
    """What of a folder is still as it was written: the facts of its arrays and the hashes of its tokenizer. What is not is named, and
    removed to be made anew."""
    if not (out / "data.json").exists():
        return _whole_tokenizer(out, say)
    try:
        made = load(out)
    except ValueError as error:
        say(f"{error}; all is made anew")
        return {}
    whole: dict[str, Any] = {part: made.facts[part] for part in PARTS if made.is_whole(part)}
    if fault := made.fault_of_tokenizer():
        say(f"{out / 'tokenizer'} must be the tokenizer that was written, got {fault}: it is made anew, and the arrays with it")
        return {}
    for part in PARTS:
        if part not in whole and not _record(out / f"{part}.bin").exists():  # with a record it is being made anew since an earlier call
            say(f"{part}.bin in {out} is not what was written: it is made anew")
            for name in (f"{part}.bin", f"{part}.bin.xz"):
                remove(out / name)
    return whole | {"tokenizer": made.tokenizer_files()}


def _whole_tokenizer(out: Path, say: Callable[[str], object]) -> dict[str, Any]:
    """The hashes of the tokenizer of a folder that is not finished, if its files are as recorded."""
    with suppress(OSError, ValueError):
        files = read_json(_record(out / "tokenizer"), files=dict)["files"]
        if files and not changed(out / "tokenizer", files):
            return {"tokenizer": files}
    say(f"the tokenizer in {out} is not what was written: all is made anew")
    for part in PARTS:  # their rows may be of another tokenizer
        _record(out / f"{part}.bin").unlink(missing_ok=True)
    return {}


def _same_request(out: Path, request: dict[str, Any]) -> bool:
    """Was this folder begun with the same request? An error if it holds something else."""
    if not _has_begun(out):  # what was killed before it began is no claim
        return False
    try:
        before = read_json(out / "request.json")
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"out must be a new folder or one of an earlier call, got {out}, of which that cannot be told: {error}; delete it to begin anew"
        ) from None
    for key, value in request.items():
        if before.get(key) != value:
            raise ValueError(f"out must be a new folder or one prepared with the same {key}, {before.get(key)!r}, got {value!r} for {out}")
    return True


def _has_begun(out: Path) -> bool:
    return (out / "tokenizer").exists() or any(out.glob("*.bin*"))


def _clear(out: Path) -> None:
    """Removes what was made so far."""
    for name in ("tokenizer", *(f"{part}.bin" for part in PARTS)):
        remove(out / name)
        _record(out / name).unlink(missing_ok=True)


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
    if path.is_symlink() or not path.is_file():  # what a link leads to is another's
        remove(path)
    state, digest = _recorded(record, path, row)
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
            digest.update(packed.tobytes())
            file.flush()
            os.fsync(file.fileno())
            state["rows"] += rows
            state["lines"] += len(chunk)
            state["documents"] += chunk.count(None)
            state["rest"] = flat[rows * (length - 1) :].tolist()
            state["complete"] |= not chunk
            state["sha256"] = digest.hexdigest()
            write_sealed(record, state)
    counts = {"rows": state["rows"], "tokens": state["rows"] * length, "documents": state["documents"]}
    return counts | {"sha256": digest.hexdigest(), "stopped_at_limit": state["left_out"]}


def _recorded(record: Path, path: Path, row: int) -> tuple[dict[str, Any], Any]:
    """Where to go on, and the hash so far; at the beginning, where the rows are not those that were recorded."""
    try:
        state = read_json(record, **{name: type(value) for name, value in STATE.items()})
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
def _decompressed(path: Path, size: int, *unchanged: int) -> bytes:
    """So many bytes, as long as size and time of the file are the same. An archive that has more is not unpacked further."""
    try:
        with lzma.open(path) as file:
            content = file.read(size + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"data must have {path.name} as xz made it, got one that is damaged in {path.parent}: {error}") from None
    if len(content) != size:
        found = "more" if len(content) > size else len(content)
        raise ValueError(f"data must have {path.name} of {size} bytes when unpacked, got {found} in {path.parent}")
    return content


def _record(path: Path) -> Path:
    """How far the packing of an array has come; deleted when all is done."""
    return path.with_suffix(".json.part")


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
