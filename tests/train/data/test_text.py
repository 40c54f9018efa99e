"""Text to lines: streamed, long lines in pieces, and refused where it is wrong."""

import gzip
from pathlib import Path
from typing import Any

import datasets
import pytest
import zstandard
from transformers import AutoTokenizer

from refusals import refused
from shaped.train.data import packing
from shaped.train.data import prepare as data
from shaped.train.data import text as text_module
from shaped.train.data.text import LONGEST, read_lines
from train.conftest import documents
from train.data.preparation import HOW, no_more_memory_than


def test_text_is_streamed(tmp_path: Path):
    """The first lines come when a small part of the file was read, so memory does not grow with it."""
    path, read = tmp_path / "long.txt", []
    path.write_text("a line of some words\n" * 400_000)
    stream = read_lines(str(path), read.append)
    for _ in range(100_000):
        next(stream)
    assert 1e6 < sum(read) < 4e6 < path.stat().st_size


def test_a_line_without_end_comes_in_pieces(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Short ones, cut between words, and few of them at a time: memory does not grow with the line. The tokens are those of the whole."""
    words, longest = " ".join(text.read_text().split()), 1 << 12
    monkeypatch.setattr(text_module, "LONGEST", longest)
    long = tmp_path / "long.txt"
    long.write_text("  " + words * 4)
    pieces = list(read_lines(str(long)))
    assert pieces.pop() is None
    assert len(pieces) > 20
    assert max(len(piece or "") for piece in pieces) <= 2 * longest
    assert " ".join(piece or "" for piece in pieces).split() == (words * 4).split()
    flat, sizes = packing._tokenise, []

    def measured(chunk, *rest):
        sizes.append(sum(len(line or "") for line in chunk))
        return flat(chunk, *rest)

    monkeypatch.setattr(packing, "_tokenise", measured)
    monkeypatch.setattr(packing, "CHARACTERS", 4 * longest)
    made = data.prepare([str(long)], tmp_path / "out", valid=[str(text)], **HOW)
    assert max(sizes) <= 6 * longest
    tokenizer = AutoTokenizer.from_pretrained(made.folder / "tokenizer")
    whole = tokenizer(words * 4, add_special_tokens=False)["input_ids"]
    packed = made.rows("train")[:, 1:].ravel()
    assert packed.tolist() == whole[: len(packed)]


@pytest.mark.parametrize("first", range(4))
def test_long_lines_are_cut_between_characters_and_end_no_document(tmp_path: Path, first: int):
    """Without a space, and of characters of three bytes; spaces that fill whole pieces; and what comes after is still the same document."""
    wide = "x" * first + "字" * LONGEST
    path = tmp_path / "long.txt"
    path.write_text(f"{wide}\nnext{' ' * 3 * LONGEST}end \nlast\n{' ' * 2 * LONGEST}\nother\n")
    found = list(read_lines(str(path)))
    assert "".join(line or "" for line in found[: found.index("next")]) == wide
    assert found[found.index("next") :] == ["next", "end", "last", None, "other", None]


def test_the_line_of_a_wrong_byte_is_its_number_in_the_file(tmp_path: Path):
    (tmp_path / "long.txt").write_bytes(b"one\n" + b"word " * LONGEST + b"\n\xff\n")
    with refused("0xff", "line 3"):
        list(read_lines(str(tmp_path / "long.txt")))


def test_a_long_row_of_a_dataset_comes_in_pieces_too(monkeypatch: pytest.MonkeyPatch):
    rows = [{"text": "word " * LONGEST + "\nshort"}, {"text": None}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **how: iter(rows))
    found = read_lines("owner/name")
    first = [next(found) for _ in range(7)]
    assert [line.split()[-1] if line else None for line in first] == ["word"] * 5 + ["short", None]
    with refused("column 'text'", "owner/name"):
        next(found)


def test_a_dataset_that_fails_without_a_word_is_refused(monkeypatch: pytest.MonkeyPatch):
    def fail(*names: str, **how: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with refused("text must be a file or a dataset", "owner/name"):
        next(read_lines("owner/name"))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_archive_that_unpacks_to_much_more_is_refused(tmp_path: Path, suffix: str):
    """A word without end, of 64 MiB in some kilobytes; what was unpacked of it until then stays small."""
    content = bytes([97]) * (1 << 26)
    path = tmp_path / f"bomb.txt{suffix}"
    path.write_bytes(gzip.compress(content) if suffix == ".gz" else zstandard.ZstdCompressor().compress(content))
    with no_more_memory_than(1 << 27), refused("text must unpack to at most 200 times its size", str(path)):
        for _ in read_lines(str(path)):
            pass


def test_wrong_text_is_refused(text: Path, tmp_path: Path):
    def file(name: str, content: bytes) -> list[str]:
        (tmp_path / name).write_bytes(content)
        return [str(tmp_path / name)]

    packed = gzip.compress(text.read_bytes())
    zstd = zstandard.ZstdCompressor().compress(text.read_bytes())
    cases: list[tuple[list[str], dict[str, Any], tuple[str, ...]]] = [
        ([], {}, ("text", "none")),
        ([str(tmp_path / "nowhere.txt")], {}, ("text", "nowhere.txt")),
        ([str(tmp_path)], {}, ("text", "neither")),
        (file("latin.txt", "caf\xe9\n".encode("latin-1")), {}, ("UTF-8", "0xe9", "line 1")),
        (file("empty.txt", b"\n\n"), {}, ("text", "words")),
        (file("cut.txt.gz", packed[: len(packed) // 2]), {}, ("cut.txt.gz", "breaks off")),
        (file("not.txt.gz", b"plain text"), {}, ("not.txt.gz", "damaged")),
        (file("not.txt.zst", b"plain text"), {}, ("not.txt.zst", "damaged")),
        (file("cut.txt.zst", zstd[: len(zstd) // 2]), {}, ("cut.txt.zst", "breaks off")),
        ([str(text)], {"vocab": 3}, ("vocab", "3")),
        ([str(text)], {"vocab": 8}, ("vocab", "8")),
        ([str(text)], {"length": 4}, ("length", "4")),
        ([str(text)], {"valid_share": 0.9}, ("valid_share", "0.9")),
        ([str(text)], {"tokens": 5}, ("tokens", "5")),
    ]
    for number, (sources, how, words) in enumerate(cases):
        with refused(*words):
            data.prepare(sources, tmp_path / f"out{number}", **(HOW | how))
        assert not (tmp_path / f"out{number}").exists()


def test_text_that_fills_no_row_to_train_on_or_to_test_with_is_refused(text: Path, tmp_path: Path):
    """It leaves nothing that would keep the right request out of the folder."""
    (tmp_path / "one.txt").write_text(documents(600).replace("\n\n", "\n"))
    (tmp_path / "short.txt").write_text("ba\n")
    out = tmp_path / "out"
    out.mkdir()
    cases: list[tuple[list[Path], dict[str, Any], str]] = [
        ([text], {"valid_share": 0.0}, "600 from 600 documents and 0 from 0"),
        ([tmp_path / "one.txt"], {}, "0 from 0 documents"),
        ([text], {"valid": [str(tmp_path / "short.txt")]}, "0 from 1 documents"),
        ([tmp_path / "short.txt"], {"valid": [str(text)]}, "0 from 1 documents and"),
    ]
    for sources, how, counts in cases:
        with refused("text must fill rows of 32 tokens", counts, "blank lines", "valid_share", "valid)"):
            data.prepare([str(path) for path in sources], out, **(HOW | how))
        assert list(out.iterdir()) == []
    data.prepare([str(text)], out, **HOW)
