"""Damaged data: refused in one line, or made anew."""

import json
import lzma
import os
import shutil
from pathlib import Path

import pytest

from refusals import refused
from shaped.files import read_json, write_json
from shaped.train.data import packing
from shaped.train.data import prepare as data
from shaped.train.data.prepared import load_data
from train.data.preparation import HOW, no_more_memory_than


def test_damaged_data_is_refused(prepared: Path, tmp_path: Path):
    for name in ("data.json", "train.bin", "valid.bin"):
        (tmp_path / name).write_bytes((prepared / name).read_bytes())
    content = bytearray((tmp_path / "train.bin").read_bytes())
    content[1000] ^= 1
    (tmp_path / "train.bin").write_bytes(content)
    with refused("hashes", "train.bin"):
        load_data(tmp_path).verify()
    (tmp_path / "train.bin").write_bytes(content[:-5])
    with refused("train.bin", str(len(content)), str(len(content) - 5)):
        load_data(tmp_path).rows("train")
    content[1001] = 0xFF
    (tmp_path / "train.bin").write_bytes(content)
    with refused("train.bin", "below vocab", "6"):
        load_data(tmp_path).rows("train")
    (tmp_path / "train.bin").unlink()
    with refused("train.bin", "got 0"):
        load_data(tmp_path).rows("train")
    (tmp_path / "data.json").write_text("{")
    with refused("data.json", "damaged"):
        load_data(tmp_path)


@pytest.mark.parametrize("part", ["train", "valid"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_array_is_made_anew(text: Path, prepared: Path, tmp_path: Path, part: str, damage: str, monkeypatch: pytest.MonkeyPatch):
    """Also if that is interrupted; the other one is not touched."""
    out = tmp_path / "out"
    shutil.copytree(prepared, out)
    array, content = out / f"{part}.bin", bytearray((prepared / f"{part}.bin").read_bytes())
    content[100] ^= damage == "flipped"
    array.write_bytes(content[:-5] if damage == "cut" else content)
    if damage == "gone":
        array.unlink()
    said, flat = [], packing._tokenise
    monkeypatch.setattr(packing, "CHUNK", 50)
    monkeypatch.setattr(packing, "_tokenise", lambda *given: flat(*given) if array.stat().st_size == 0 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        data.prepare([str(text)], out, log=said.append, **HOW)
    monkeypatch.setattr(packing, "_tokenise", flat)
    assert said == [f"{part}.bin in {out} is not what was written: it is made anew"]
    data.prepare([str(text)], out, **HOW).verify()
    assert sorted(path.name for path in out.iterdir()) == ["data.json", "request.json", "tokenizer", "train.bin", "valid.bin"]
    for name in ("train.bin", "valid.bin", "data.json"):
        assert (out / name).read_bytes() == (prepared / name).read_bytes()


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_rows_that_are_not_those_of_the_record_are_made_anew(
    text: Path, prepared: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
):
    """Interrupted, and then train.bin lost its end or changed: zeros in its place, and what changed, would be wrong tokens."""
    monkeypatch.setattr(packing, "CHUNK", 300)
    flat, calls = packing._tokenise, []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return flat(*given)

    monkeypatch.setattr(packing, "_tokenise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        data.prepare([str(text)], tmp_path, **HOW)
    assert (tmp_path / "train.json.part").exists()
    content = bytearray((tmp_path / "train.bin").read_bytes())
    content[100] ^= damage == "flipped"
    (tmp_path / "train.bin").write_bytes(content[:1000] if damage == "cut" else content)
    assert data.prepare([str(text)], tmp_path, **HOW).facts["train"] == load_data(prepared).facts["train"]
    load_data(tmp_path).verify()


FACTS = ("vocab", "length", "dtype", "special", "train", "valid")
WRONG = (None, [], "x", -1, 1.5, 10**30, {}, {"rows": "many"}, {"[MASK]": "four"})


@pytest.mark.parametrize("key", FACTS)
def test_facts_of_any_shape_are_refused_in_a_line(prepared: Path, tmp_path: Path, key: str):
    facts = read_json(prepared / "data.json")  # without its seal: made elsewhere
    for value in WRONG:
        (tmp_path / "data.json").write_text(json.dumps(facts | {key: value}))
        with refused("data must be", str(tmp_path), "data.json", "damaged"):
            load_data(tmp_path)
    for inner in facts[key] if isinstance(facts[key], dict) else ():
        for value in (None, [], "x" if inner != "sha256" else 1):
            (tmp_path / "data.json").write_text(json.dumps(facts | {key: facts[key] | {inner: value}}))
            with refused("data.json", "damaged", inner):
                load_data(tmp_path)
    del facts[key]
    (tmp_path / "data.json").write_text(json.dumps(facts))
    with refused("data.json", "damaged", key):
        load_data(tmp_path)


@pytest.mark.parametrize("content", [b"[]", b"3", b"null", b"", b"\xff\xfe", b"[" * 100_000, b'{"vocab": NaN}'])
def test_what_is_no_object_is_refused_in_a_line(prepared: Path, text: Path, tmp_path: Path, content: bytes):
    (tmp_path / "data.json").write_bytes(content)
    with refused("data.json", "damaged"):
        load_data(tmp_path)
    out = tmp_path / "out"
    shutil.copytree(prepared, out)
    (out / "request.json").write_bytes(content)
    with refused("out", str(out)):
        data.prepare([str(text)], out, **HOW)
    shutil.copy(prepared / "request.json", out)
    (out / "data.json").write_bytes(content)  # of which the rest can be made again
    assert data.prepare([str(text)], out, log=lambda line: None, **HOW).facts == load_data(prepared).facts


def test_a_damaged_archive_is_refused_in_a_line(prepared: Path, tmp_path: Path):
    """Also one that unpacks to more than the array has: no further than that."""
    shutil.copy(prepared / "data.json", tmp_path)
    content = (prepared / "train.bin").read_bytes()
    bomb = lzma.compress(bytes(1 << 26), preset=0)
    archives = {b"no archive": "damaged", lzma.compress(content[:-2]): f"got {len(content) - 2}", bomb: "got more"}
    for archive, words in archives.items():
        (tmp_path / "train.bin.xz").write_bytes(archive)
        with no_more_memory_than(1 << 24), refused("train.bin.xz", words, str(tmp_path)):
            load_data(tmp_path).rows("train")


DAMAGES = {
    "cut": lambda folder: (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text()[:-5]),
    "another word": lambda folder: (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text().replace('"ba"', '"bx"')),
    "no config": lambda folder: (folder / "tokenizer_config.json").unlink(),
    "gone": shutil.rmtree,
    "a pipe": lambda folder: ((folder / "tokenizer.json").unlink(), os.mkfifo(folder / "tokenizer.json")),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("finished", [True, False])
def test_a_damaged_tokenizer_is_made_anew(
    text: Path, prepared: Path, tmp_path: Path, damage: str, finished: bool, monkeypatch: pytest.MonkeyPatch
):
    """By the same command, which says so; until then nothing is trained with it."""
    out = tmp_path / "out"
    if finished:
        shutil.copytree(prepared, out)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(data, "pack_rows", lambda *given: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                data.prepare([str(text)], out, **HOW)
        shutil.copy(prepared / "train.bin", out)
    DAMAGES[damage](out / "tokenizer")
    if finished:
        with refused("data must have the tokenizer of data.json", str(out)):
            load_data(out).verify()
    said: list[str] = []
    data.prepare([str(text)], out, log=said.append, **HOW).verify()
    assert len(said) == 1
    assert "the tokenizer" in said[0]
    for path in (prepared / "tokenizer").iterdir():
        assert (out / "tokenizer" / path.name).read_bytes() == path.read_bytes()
    assert load_data(out).facts == load_data(prepared).facts
    assert sorted(path.name for path in out.iterdir()) == ["data.json", "request.json", "tokenizer", "train.bin", "valid.bin"]


def test_what_a_link_leads_to_is_left_alone(prepared: Path, text: Path, tmp_path: Path):
    """Where an array is to be made, a link is replaced and not followed."""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere.bin"
    shutil.copytree(prepared, out)
    elsewhere.write_bytes(b"another's")
    (out / "train.bin").unlink()
    (out / "train.bin").symlink_to(elsewhere)
    (out / "data.json").unlink()
    data.prepare([str(text)], out, log=lambda line: None, **HOW).verify()
    assert elsewhere.read_bytes() == b"another's"
    assert not (out / "train.bin").is_symlink()


def test_what_is_beside_the_files_of_a_tokenizer_is_no_part_of_it(prepared: Path, text: Path, tmp_path: Path):
    """Such as what Jupyter and file managers leave."""
    out = tmp_path / "data"
    shutil.copytree(prepared, out)
    (out / "tokenizer" / ".ipynb_checkpoints").mkdir()
    (out / "tokenizer" / ".DS_Store").write_text("a file")
    load_data(out).verify()
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    said: list[str] = []
    made = data.prepare([str(text)], out, log=said.append, **HOW)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == times
    assert said == []
    assert made.hash_tokenizer() == made.facts["tokenizer"]


def test_a_folder_from_before_tokenizers_had_hashes_is_read(prepared: Path, text: Path, tmp_path: Path):
    out = tmp_path / "out"
    shutil.copytree(prepared, out)
    facts = read_json(out / "data.json")
    del facts["tokenizer"]
    write_json(out / "data.json", facts)
    load_data(out).verify()
    assert data.prepare([str(text)], out, **HOW).facts == facts
    (out / "tokenizer" / "tokenizer.json").write_text("{}")
    with refused("tokenizer", "cannot be read", str(out)):
        load_data(out).verify()


def test_a_folder_whose_request_is_lost_is_not_taken_over(prepared: Path, text: Path, tmp_path: Path):
    """It may be of another text."""
    out = tmp_path / "out"
    shutil.copytree(prepared, out)
    (out / "request.json").unlink()
    with refused("out", str(out), "delete it to begin anew"):
        data.prepare([str(text)], out, **HOW)
