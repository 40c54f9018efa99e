"""Text to arrays: the same whatever the compression or an interruption, streamed, and refused where it is wrong."""

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import zstandard
from transformers import AutoTokenizer

from refusals import refused
from shaped.train import data
from shaped.train.text import lines
from train.conftest import LENGTH, documents

HOW: dict[str, Any] = {"vocab": 80, "length": LENGTH, "valid_share": 0.1, "progress": False}
HOW_ELSE: dict[str, Any] = HOW | {"length": 16}


def test_rows_hold_the_text(text: Path, prepared: Path):
    """600 documents of one row each, one of ten held out; [CLS] first, [SEP] last, and the words between."""
    made = data.load(prepared)
    rows = made.rows("train")
    assert rows.dtype == np.uint16
    assert (len(rows), len(made.rows("valid"))) == (540, 60)
    assert (rows[:, 0] == 2).all()
    assert (rows[:, -1] == 3).all()
    assert rows[:, 1:-1].min() >= 5
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    paragraphs = text.read_text().split("\n\n")
    assert tokenizer.decode(rows[0][1:-1]) == paragraphs[0]
    assert tokenizer.decode(made.rows("valid")[0][1:-1]) == paragraphs[9]
    assert made.facts["train"]["tokens"] == 540 * LENGTH
    assert made.facts["train"]["documents"] == 540
    assert made.facts["request"]["text"][0]["bytes"] == text.stat().st_size
    made.verify()


def test_pairs_are_encoded_as_glue_needs_them(prepared: Path):
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    ids = tokenizer("ba", "be")["input_ids"]
    assert [tokenizer.convert_ids_to_tokens(i) for i in ids] == ["[CLS]", "ba", "[SEP]", "be", "[SEP]"]
    assert AutoTokenizer.from_pretrained(prepared / "tokenizer")("BA")["input_ids"] == tokenizer("ba")["input_ids"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_text_gives_the_same_arrays(text: Path, prepared: Path, tmp_path: Path, suffix: str):
    packed = tmp_path / f"text.txt{suffix}"
    content = text.read_bytes()
    packed.write_bytes(gzip.compress(content) if suffix == ".gz" else zstandard.ZstdCompressor().compress(content))
    made = data.prepare([str(packed)], tmp_path / "out", **HOW)
    assert made.facts["train"] == data.load(prepared).facts["train"]


def test_test_text_of_its_own(text: Path, tmp_path: Path):
    other = tmp_path / "other.txt"
    other.write_text(documents(50, seed=1))
    made = data.prepare([str(text)], tmp_path / "out", valid=[str(other)], **HOW)
    assert (made.facts["train"]["rows"], made.facts["valid"]["rows"]) == (600, 50)


def test_a_dataset_of_the_hub(prepared: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fake(name: str, configuration: str | None, split: str, streaming: bool):
        assert (name, configuration, split, streaming) == ("owner/name", "some", "train", True)
        return ({"text": paragraph} for paragraph in text.read_text().split("\n\n"))

    monkeypatch.setattr(datasets, "load_dataset", fake)
    made = data.prepare(["owner/name:some"], tmp_path / "out", **HOW)
    assert made.facts["train"] == data.load(prepared).facts["train"]


def test_an_interrupted_preparation_goes_on(text: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Interrupted at every chunk once: the arrays are those of one go, and finished chunks are not done again."""
    monkeypatch.setattr(data, "CHUNK", 300)
    flat, calls = data._flat, []

    def interrupted(chunk, *rest):
        calls.append(len(chunk))
        if len(calls) % 2 == 0:
            raise KeyboardInterrupt
        return flat(chunk, *rest)

    monkeypatch.setattr(data, "_flat", interrupted)
    tries = 0
    while not (tmp_path / "data.json").exists():
        tries += 1
        try:
            data.prepare([str(text)], tmp_path, **HOW)
        except KeyboardInterrupt:
            assert not (tmp_path / "data.json").exists()
    assert tries > 3
    assert data.load(tmp_path).facts["train"] == data.load(prepared).facts["train"]
    assert data.load(tmp_path).facts["valid"] == data.load(prepared).facts["valid"]
    before = len(calls)
    data.prepare([str(text)], tmp_path, **HOW)
    assert len(calls) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.json", "request.json", "tokenizer", "train.bin", "valid.bin"]


def test_what_a_killed_run_wrote_but_did_not_record_is_cut_off(text: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data, "CHUNK", 300)
    write_json = data.write_json

    def killed(path, value):
        if path.name == "train.json.part" and value["rows"] > 200:
            raise KeyboardInterrupt
        write_json(path, value)

    monkeypatch.setattr(data, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        data.prepare([str(text)], tmp_path, **HOW)
    monkeypatch.setattr(data, "write_json", write_json)
    assert data.prepare([str(text)], tmp_path, **HOW).facts["train"] == data.load(prepared).facts["train"]


def test_text_is_streamed(tmp_path: Path):
    """The first lines come when a small part of the file was read, so memory does not grow with it."""
    path, read = tmp_path / "long.txt", []
    path.write_text("a line of some words\n" * 400_000)
    stream = lines(str(path), read.append)
    for _ in range(100_000):
        next(stream)
    assert 1e6 < sum(read) < 4e6 < path.stat().st_size


def test_a_limit_of_tokens(text: Path, tmp_path: Path):
    made = data.prepare([str(text)], tmp_path, tokens=100 * LENGTH - 3, **HOW)
    assert made.facts["train"]["rows"] == 100
    assert made.facts["train"]["stopped_at_limit"]
    assert not made.facts["valid"]["stopped_at_limit"]


def test_an_array_may_be_carried_compressed(prepared: Path, tmp_path: Path):
    (tmp_path / "data.json").write_bytes((prepared / "data.json").read_bytes())
    (tmp_path / "train.bin.xz").write_bytes(lzma.compress((prepared / "train.bin").read_bytes()))
    assert np.array_equal(data.load(tmp_path).rows("train"), data.load(prepared).rows("train"))


def test_damaged_data_is_refused(prepared: Path, tmp_path: Path):
    for name in ("data.json", "train.bin", "valid.bin"):
        (tmp_path / name).write_bytes((prepared / name).read_bytes())
    content = bytearray((tmp_path / "train.bin").read_bytes())
    content[1000] ^= 1
    (tmp_path / "train.bin").write_bytes(content)
    with refused("hashes", "train.bin"):
        data.load(tmp_path).verify()
    (tmp_path / "train.bin").write_bytes(content[:-5])
    with refused("train.bin", str(len(content)), str(len(content) - 5)):
        data.load(tmp_path).rows("train")
    (tmp_path / "train.bin").unlink()
    with refused("train.bin", "got 0"):
        data.load(tmp_path).rows("train")
    (tmp_path / "data.json").write_text("{")
    with refused("data.json", "damaged"):
        data.load(tmp_path)


def test_wrong_text_is_refused(text: Path, tmp_path: Path):
    def file(name: str, content: bytes) -> list[str]:
        (tmp_path / name).write_bytes(content)
        return [str(tmp_path / name)]

    packed = gzip.compress(text.read_bytes())
    zstd = zstandard.ZstdCompressor().compress(text.read_bytes())
    cases: list[tuple[list[str], dict[str, Any], tuple[str, ...]]] = [
        ([], {}, ("text", "none")),
        ([str(tmp_path / "nowhere.txt")], {}, ("text", "nowhere.txt")),
        ([str(tmp_path)], {}, ("text", "folder")),
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
        assert not (tmp_path / f"out{number}" / "data.json").exists()


def test_a_folder_prepared_otherwise_is_not_overwritten(text: Path, tmp_path: Path):
    data.prepare([str(text)], tmp_path, **HOW)
    with refused("length", "32", "16"):
        data.prepare([str(text)], tmp_path, **HOW_ELSE)
    assert json.loads((tmp_path / "request.json").read_text())["length"] == LENGTH
