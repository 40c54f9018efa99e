"""Where text comes from: plain, .gz or .zst files, or a Hugging Face dataset; read line by line, never whole."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from shaped.process import quote_error, suggest_install

Line = str | None
"""A paragraph, or None where a document ends."""

LONGEST = 1 << 16
"""Bytes of a paragraph, about: longer ones come in pieces, which bounds the memory."""

UNPACKED, RATIO = 1 << 24, 200
"""An archive that unpacks to more than UNPACKED bytes and to more than RATIO times its size is refused: text never compresses so well."""

PORTION = 1 << 10
"""Bytes of a .zst that are unpacked at a time: they may become thousands of times as many."""

FILES = (".txt", ".gz", ".zst", ".text", ".md", ".tsv", ".csv", ".json", ".jsonl")


def is_file(source: str) -> bool:
    """True for a file, False for the name of a dataset. A name that ends like a file must be one that exists."""
    if Path(source).is_file():
        return True
    if Path(source).exists():
        raise ValueError(f"text must be a file or the name of a Hugging Face dataset, got {source!r}, which is neither")
    if source.endswith(FILES) or source.startswith(("/", ".")):
        raise ValueError(f"text must be a file that exists, or the name of a Hugging Face dataset, got {source!r}")
    return False


def fingerprint(source: str) -> dict[str, Any]:
    """Identifies a source: a file by its size and hash, a dataset by its name."""
    if not is_file(source):
        return {"dataset": source}
    with open(source, "rb") as file:
        return {"file": Path(source).name, "bytes": Path(source).stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_lines(source: str, advance: Callable[[int], object] = lambda _: None) -> Iterator[Line]:
    """The paragraphs of a source. A blank line ends a document, as do the end of a file and the end of a dataset's row.

    `advance` is told how many bytes of the file were read since it was last told.
    """
    inside = False
    for line in _read_file(source, advance) if is_file(source) else _read_dataset(source):
        text = line.strip() if line is not None else ""
        if text:
            yield text
        elif inside:
            yield None
        inside = bool(text)
    if inside:
        yield None


def _read_file(source: str, advance: Callable[[int], object]) -> Iterator[str]:
    with ExitStack() as stack:
        raw = stack.enter_context(open(source, "rb"))
        stream = io.BufferedReader(stack.enter_context(_decompress(raw, source)))
        reported, counted, most = 0, _Counted(stream), max(UNPACKED, RATIO * Path(source).stat().st_size)
        try:
            for piece in _decode_pieces(counted):
                if counted.size > most:
                    raise ValueError(f"text must unpack to at most {RATIO} times its size, got more from {source}: unpack it first")
                yield piece
                if raw.tell() - reported >= 1 << 20:
                    advance(raw.tell() - reported)
                    reported = raw.tell()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"text must be UTF-8, got byte 0x{error.object[error.start]:02x} in line {counted.number} of {source}"
            ) from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"text must be a whole file, got {source}, which breaks off or is damaged: {error}") from None
        except Exception as error:
            if type(error).__name__ != "ZstdError":  # known only once zstandard is imported
                raise
            raise ValueError(f"text must be a whole file, got {source}, which breaks off or is damaged: {error}") from None
        advance(raw.tell() - reported)


class _Counted:
    """Iterates over the lines of a stream, long ones in parts of at most LONGEST bytes. Counts lines (`number`) and bytes (`size`)."""

    def __init__(self, stream: IO[bytes]):
        self._stream, self.number, self.size, self._ended = stream, 0, 0, True

    def __iter__(self) -> Iterator[bytes]:
        while part := self._stream.readline(LONGEST):
            self.number += self._ended
            self.size += len(part)
            self._ended = part.endswith(b"\n")
            yield part


def _decode_pieces(parts: Iterable[bytes]) -> Iterator[str]:
    """Decodes lines. A line that comes in parts of LONGEST bytes is cut between words instead.

    The tokenizer splits at spaces anyway, so the tokens are those of the whole line. Only a word longer than a piece is cut itself.
    """
    rest, given = b"", False  # the rest of a part, after the cut; has any word of the line been yielded?
    for part in parts:
        ended = part.endswith(b"\n")
        part = rest + part
        place = len(part) if ended or len(part) < LONGEST else _find_cut(part)
        piece, rest = part[:place].decode(), part[place:]
        words = bool(piece.strip())
        if words or (ended and not given):  # only a line that is blank from end to end ends a document
            yield piece
        given = not ended and (given or words)
    if rest.strip():
        yield rest.decode()


def _find_cut(part: bytes) -> int:
    """The place to cut: where the last word begins; without any space, the start of the last UTF-8 character, which may be incomplete."""
    space = max(part.rfind(b" "), part.rfind(b"\t"))
    if space >= 0:
        return space + 1
    return next((place for place in range(len(part) - 1, len(part) - 4, -1) if part[place] & 0xC0 != 0x80), len(part))


def _decompress(raw: IO[bytes], source: str) -> Any:
    if source.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    if source.endswith(".zst"):
        try:
            import zstandard
        except ImportError:
            raise ValueError(f"text in .zst needs the package zstandard ({suggest_install('train')}), got {source}") from None
        return _Zst(raw, zstandard.ZstdDecompressor())
    return raw


class _Zst(io.RawIOBase):
    """A .zst file as a stream. It raises EOFError for a truncated file, which zstandard's own stream ends silently."""

    def __init__(self, raw: IO[bytes], decompressor: Any):
        self._raw, self._decompressor, self._frame, self._left = raw, decompressor, None, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            data = self._raw.read(PORTION)
            if not data:
                if self._frame is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            while data:
                self._frame = self._frame or self._decompressor.decompressobj()
                self._left = memoryview(bytes(self._left) + self._frame.decompress(data))
                data = self._frame.unused_data if self._frame.eof else b""
                self._frame = None if self._frame.eof else self._frame
        taken, self._left = self._left[: len(buffer)], self._left[len(buffer) :]  # views: a portion may unpack to megabytes
        buffer[: len(taken)] = taken
        return len(taken)


def _read_dataset(source: str) -> Iterator[Line]:
    """`name` or `name:configuration`; the rows' column "text", of the split "train"."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"text from a dataset needs the package datasets ({suggest_install('hf')}), got {source!r}") from None
    name, _, configuration = source.partition(":")
    try:
        rows = load_dataset(name, configuration or None, split="train", streaming=True)
    except Exception as error:
        raise ValueError(f"text must be a file or a dataset that can be loaded, got {source!r}: {quote_error(error)}") from None
    for row in rows:
        if not isinstance(row.get("text"), str):
            raise ValueError(f"text must be a dataset with a column 'text' of texts, got {source!r} with {', '.join(row)}")
        for line in row["text"].splitlines():
            yield from (line,) if len(line) < LONGEST else _decode_pieces(_Counted(io.BytesIO(line.encode() + b"\n")))
        yield None
