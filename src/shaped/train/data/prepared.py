"""A prepared folder, read: rows of tokens in memory-mapped arrays, with the counts and hashes in its `data.json`."""

from __future__ import annotations

import hashlib
import lzma
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from shaped.checks import whole_number
from shaped.files import check_entries, read_json, sha256
from shaped.train.data.tokenizer import SPECIAL, find_fault, hash_files

PARTS = ("train", "valid")
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
        """The array of "train" or "valid": memory-mapped, or read into memory from `.bin.xz`."""
        count, dtype, path = self.facts[part]["rows"], np.dtype(self.facts["dtype"]), self.folder / f"{part}.bin"
        if not count:
            raise ValueError(f"data must have rows of {part}, got none in {self.folder}: more text, or more of it held out")
        content = self._read_xz(part)
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
            if not self.is_intact(part):
                raise ValueError(f"data must have the hashes of data.json, got another for {part}.bin: prepare {self.folder} again")
        fault = self.find_tokenizer_fault()
        if fault and (tokenizer or fault != "none"):
            raise ValueError(f"data must have the tokenizer of data.json, got {fault}: prepare {self.folder} again")

    def hash_tokenizer(self) -> dict[str, str]:
        """Hashes of the tokenizer's files. Files that data.json does not list are ignored; older folders list none, so all count."""
        recorded = self.facts.get("tokenizer", {})
        return {name: made for name, made in hash_files(self.folder / "tokenizer").items() if not recorded or name in recorded}

    def find_tokenizer_fault(self) -> str:
        """What is wrong with the tokenizer, in words; empty if nothing is."""
        return find_fault(self.folder / "tokenizer", self.facts.get("tokenizer", {}), self.vocab)

    def is_intact(self, part: str) -> bool:
        """Does the array have the hash that data.json records?"""
        path = self.folder / f"{part}.bin"
        try:
            content = self._read_xz(part)
            made = hashlib.sha256(content).hexdigest() if content is not None else sha256(path)
        except (OSError, ValueError):
            return False
        return made == self.facts[part]["sha256"]

    def _read_xz(self, part: str) -> bytes | None:
        """The content of an array that is there only as `.bin.xz`; None if it is there as `.bin`."""
        compressed, size = self.folder / f"{part}.bin.xz", self.facts[part]["tokens"] * np.dtype(self.facts["dtype"]).itemsize
        if not compressed.is_file() or (self.folder / f"{part}.bin").exists():
            return None
        about = compressed.stat()
        return _decompress(compressed, size, about.st_size, about.st_mtime_ns)


def load_data(folder: Path) -> Data:
    """Reads and checks data.json. The arrays are read later, by `Data.rows` and `Data.verify`."""
    wrong = f"data must be a folder made by `shaped data prepare`, got {folder}"
    if folder.is_file():
        raise ValueError(f"{wrong}, which is a file: `shaped data prepare --text {folder} --out data` makes the folder data from a text")
    try:
        facts = read_json(folder / "data.json", vocab=int, length=int, dtype=str, special=dict, train=dict, valid=dict)
        for part in PARTS:
            about = check_entries(part, facts[part], rows=int, tokens=int, documents=int, sha256=str, stopped_at_limit=bool)
            if about["rows"] < 0 or about["tokens"] != about["rows"] * facts["length"]:
                raise ValueError(f"{part} must have rows of {facts['length']} tokens, got {about['tokens']} in {about['rows']} rows")
            if "bytes" in about:  # older folders do not say it
                whole_number(f"bytes of {part}", about["bytes"], least=about["rows"])
        check_entries("special", facts["special"], **dict.fromkeys(SPECIAL, int))
        if facts["special"] != IDS:
            raise ValueError(f"special must be {IDS}, got {facts['special']}")
        hashes = check_entries("tokenizer", facts.get("tokenizer", {}))  # older folders have none
        check_entries("tokenizer", hashes, **dict.fromkeys(hashes, str))
        whole_number("length", facts["length"], most=1 << 32)
        whole_number("vocab", facts["vocab"], least=len(SPECIAL) + 1, most=1 << 32)
        if facts["dtype"] not in ("uint16", "uint32"):
            raise ValueError(f"dtype must be uint16 or uint32, got {facts['dtype']!r}")
    except FileNotFoundError:
        raise ValueError(f"{wrong}, which has no data.json") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{wrong}, whose data.json is damaged: {error}") from None
    return Data(folder, facts)


@lru_cache(maxsize=2)
def _decompress(path: Path, size: int, *unchanged: int) -> bytes:
    """Reads `size` bytes and no more, so that an archive bomb is not unpacked. `unchanged` (size and time) keys the cache."""
    try:
        with lzma.open(path) as file:
            content = file.read(size + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"data must have {path.name} as xz made it, got one that is damaged in {path.parent}: {error}") from None
    if len(content) != size:
        found = "more" if len(content) > size else len(content)
        raise ValueError(f"data must have {path.name} of {size} bytes when unpacked, got {found} in {path.parent}")
    return content
