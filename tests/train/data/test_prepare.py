"""Text to arrays: the same for every compression and after an interruption."""

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
from shaped.train.data import packing
from shaped.train.data import prepare as data
from shaped.train.data.prepared import load_data
from shaped.train.data.tokenizer import load_tokenizer
from shaped.train.folder_lock import Busy, folder_lock
from train.conftest import LENGTH, documents, status
from train.data.preparation import HOW, HOW_ELSE


def test_rows_hold_the_text(text: Path, prepared: Path):
    """600 documents of one row each, one of ten held out; [CLS] first, [SEP] last, and the words between."""
    made = load_data(prepared)
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


def test_special_tokens_in_the_text_are_text(tmp_path: Path):
    lines = ["the end [SEP] of a [MASK] word [CLS] and [PAD] [UNK]"] * 40
    (tmp_path / "text.txt").write_text("\n".join(lines[:20]) + "\n\n" + "\n".join(lines[20:]) + "\n")
    made = data.prepare([str(tmp_path / "text.txt")], tmp_path / "data", vocab=60, length=16, valid_share=0.5, progress=False)
    tokenizer = load_tokenizer(tmp_path / "data" / "tokenizer")
    rows = made.rows("train").reshape(-1).tolist()
    assert rows.count(tokenizer.token_to_id("[SEP]")) <= 1  # of the document
    assert not {tokenizer.token_to_id(name) for name in ("[PAD]", "[UNK]", "[MASK]")} & set(rows)
    assert rows.count(tokenizer.token_to_id("[")) > 50


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_text_gives_the_same_arrays(text: Path, prepared: Path, tmp_path: Path, suffix: str):
    packed = tmp_path / f"text.txt{suffix}"
    content = text.read_bytes()
    packed.write_bytes(gzip.compress(content) if suffix == ".gz" else zstandard.ZstdCompressor().compress(content))
    made = data.prepare([str(packed)], tmp_path / "out", **HOW)
    assert made.facts["train"] == load_data(prepared).facts["train"]


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
    assert made.facts["train"] == load_data(prepared).facts["train"]


def test_an_interrupted_preparation_goes_on(text: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Interrupted at every chunk once: the arrays are those of one go, and finished chunks are not done again."""
    monkeypatch.setattr(packing, "CHUNK", 300)
    flat, calls = packing._tokenise, []

    def interrupted(chunk, *rest):
        calls.append(len(chunk))
        if len(calls) % 2 == 0:
            raise KeyboardInterrupt
        return flat(chunk, *rest)

    monkeypatch.setattr(packing, "_tokenise", interrupted)
    tries = 0
    while not (tmp_path / "data.json").exists():
        tries += 1
        try:
            data.prepare([str(text)], tmp_path, **HOW)
        except KeyboardInterrupt:
            assert not (tmp_path / "data.json").exists()
    assert tries > 3
    assert load_data(tmp_path).facts["train"] == load_data(prepared).facts["train"]
    assert load_data(tmp_path).facts["valid"] == load_data(prepared).facts["valid"]
    before = len(calls)
    data.prepare([str(text)], tmp_path, **HOW)
    assert len(calls) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.json", "request.json", "tokenizer", "train.bin", "valid.bin"]


def test_the_command_says_that_it_goes_on(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Its array is half-written after Ctrl-C, so it must not say that no file is."""

    def interrupt(*rest):
        raise KeyboardInterrupt

    flat, out = packing._tokenise, tmp_path / "out"
    command = ("data", "prepare", "--text", str(text), "--out", str(out), "--vocab", "100", "--length", str(LENGTH))
    monkeypatch.setattr(packing, "_tokenise", interrupt)
    assert status(monkeypatch, *command) == 130
    assert capsys.readouterr().err == "shaped: interrupted; the same command goes on from there\n"
    assert (out / "request.json").exists()
    monkeypatch.setattr(packing, "_tokenise", flat)
    assert status(monkeypatch, *command) == 0
    assert (out / "data.json").exists()


def test_what_a_killed_run_wrote_but_did_not_record_is_cut_off(text: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packing, "CHUNK", 300)
    write_sealed = packing.write_sealed

    def killed(path, value):
        if path.name == "train.json.part" and value["rows"] > 200:
            raise KeyboardInterrupt
        write_sealed(path, value)

    monkeypatch.setattr(packing, "write_sealed", killed)
    with pytest.raises(KeyboardInterrupt):
        data.prepare([str(text)], tmp_path, **HOW)
    monkeypatch.setattr(packing, "write_sealed", write_sealed)
    assert data.prepare([str(text)], tmp_path, **HOW).facts["train"] == load_data(prepared).facts["train"]


def test_the_same_text_gives_the_same_arrays(tmp_path: Path):
    """Also where words and pairs of letters are equally frequent: what breaks ties must not be the order of a hash table."""
    rng = np.random.default_rng(5)
    letters = list("abcdefghijklmnopqrstuvwxyzäöüßéèñç")
    words = ["".join(rng.choice(letters, 6)) for _ in range(400)]
    (tmp_path / "text.txt").write_text("\n\n".join(" ".join(words[i : i + 10]) for i in range(0, 400, 10)))
    how: dict[str, Any] = HOW | {"vocab": 200}
    made = [data.prepare([str(tmp_path / "text.txt")], tmp_path / out, **how) for out in ("one", "two", "three")]
    assert len({(one.facts["train"]["sha256"], one.facts["valid"]["sha256"]) for one in made}) == 1
    assert len({(one.folder / "tokenizer" / "tokenizer.json").read_bytes() for one in made}) == 1
    vocabulary = json.loads((made[0].folder / "tokenizer" / "tokenizer.json").read_text())
    assert [token["content"] for token in vocabulary["added_tokens"]] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert len(vocabulary["model"]["vocab"]) == 200


def test_a_limit_of_tokens(text: Path, tmp_path: Path):
    made = data.prepare([str(text)], tmp_path, tokens=100 * LENGTH - 3, **HOW)
    assert made.facts["train"]["rows"] == 100
    assert made.facts["train"]["stopped_at_limit"]
    assert not made.facts["valid"]["stopped_at_limit"]


def test_an_array_may_be_carried_compressed(prepared: Path, tmp_path: Path):
    (tmp_path / "data.json").write_bytes((prepared / "data.json").read_bytes())
    (tmp_path / "train.bin.xz").write_bytes(lzma.compress((prepared / "train.bin").read_bytes()))
    assert np.array_equal(load_data(tmp_path).rows("train"), load_data(prepared).rows("train"))


def test_a_folder_in_which_another_works_is_refused(text: Path, tmp_path: Path):
    with folder_lock(tmp_path / "out"), pytest.raises(Busy, match=f"^out must be .* got {tmp_path / 'out'}, where one does$"):
        data.prepare([str(text)], tmp_path / "out", **HOW)
    data.prepare([str(text)], tmp_path / "out", **HOW)


def test_a_folder_prepared_otherwise_is_not_overwritten(text: Path, tmp_path: Path):
    data.prepare([str(text)], tmp_path, **HOW)
    with refused("length", "32", "16"):
        data.prepare([str(text)], tmp_path, **HOW_ELSE)
    assert json.loads((tmp_path / "request.json").read_text())["length"] == LENGTH


@pytest.mark.parametrize("tokens", [None, 400])
def test_bytes_are_those_of_the_text_in_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int | None):
    """Of the original text, up to the last token of the last row: capitals and accents, which the tokenizer drops, have theirs."""
    rng = np.random.default_rng(0)
    words = ["Élan", "straße", "The", "cat", "ünder", "naïve", "x", "日本語", "it's"]
    lines = [" ".join(rng.choice(words, rng.integers(1, 15))) if i % 4 else "" for i in range(1, 121)]
    (tmp_path / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = []
    for chunk in (20_000, 3):
        monkeypatch.setattr(packing, "CHUNK", chunk)
        how: dict[str, Any] = {"vocab": 60, "length": 16, "valid": [str(tmp_path / "text.txt")], "progress": False, "tokens": tokens}
        found.append(data.prepare([str(tmp_path / "text.txt")], tmp_path / f"{chunk}", **how))
    assert found[0].facts["train"]["bytes"] == found[1].facts["train"]["bytes"]
    tokenizer = load_tokenizer(found[0].folder / "tokenizer")
    for part in ("train", "valid"):
        left, size = found[0].facts[part]["rows"] * 15, 0
        for line in lines:
            ends = [end for _, end in tokenizer.encode(line, add_special_tokens=False).offsets]
            if line and left < len(ends):
                size += len(line[: ends[left - 1]].encode()) if left else 0
                break
            left, size = left - (len(ends) or 1), size + len(line.encode()) + 1
            if left == 0:
                break
        assert found[0].facts[part]["bytes"] == size
