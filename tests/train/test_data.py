"""Text to arrays: the same whatever the compression or an interruption, streamed, and refused where it is wrong."""

import gzip
import json
import lzma
import os
import shutil
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import zstandard
from transformers import AutoTokenizer

from refusals import refused
from shaped.files import read_json, write_json
from shaped.train.data import packing
from shaped.train.data import prepare as data
from shaped.train.data.prepared import load_data
from shaped.train.data.text import LONGEST, lines
from shaped.train.folder_lock import Busy, folder_lock
from train.conftest import LENGTH, documents

HOW: dict[str, Any] = {"vocab": 80, "length": LENGTH, "valid_share": 0.1, "progress": False}
HOW_ELSE: dict[str, Any] = HOW | {"length": 16}


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


def test_text_is_streamed(tmp_path: Path):
    """The first lines come when a small part of the file was read, so memory does not grow with it."""
    path, read = tmp_path / "long.txt", []
    path.write_text("a line of some words\n" * 400_000)
    stream = lines(str(path), read.append)
    for _ in range(100_000):
        next(stream)
    assert 1e6 < sum(read) < 4e6 < path.stat().st_size


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


def test_a_line_without_end_comes_in_pieces(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Short ones, cut between words, and few of them at a time: memory does not grow with the line. The tokens are those of the whole."""
    words = " ".join(text.read_text().split())
    long = tmp_path / "long.txt"
    long.write_text("  " + words * 60)
    pieces = list(lines(str(long)))
    assert pieces.pop() is None
    assert len(pieces) > 20
    assert max(len(piece or "") for piece in pieces) <= 2 * LONGEST
    assert " ".join(piece or "" for piece in pieces).split() == (words * 60).split()
    flat, sizes = packing._tokenise, []

    def measured(chunk, *rest):
        sizes.append(sum(len(line or "") for line in chunk))
        return flat(chunk, *rest)

    monkeypatch.setattr(packing, "_tokenise", measured)
    monkeypatch.setattr(packing, "CHARACTERS", 4 * LONGEST)
    made = data.prepare([str(long)], tmp_path / "out", valid=[str(text)], **HOW)
    assert max(sizes) <= 6 * LONGEST
    tokenizer = AutoTokenizer.from_pretrained(made.folder / "tokenizer")
    whole = tokenizer(words * 60, add_special_tokens=False)["input_ids"]
    packed = made.rows("train")[:, 1:].ravel()
    assert packed.tolist() == whole[: len(packed)]


@pytest.mark.parametrize("first", range(4))
def test_long_lines_are_cut_between_characters_and_end_no_document(tmp_path: Path, first: int):
    """Without a space, and of characters of three bytes; spaces that fill whole pieces; and what comes after is still the same document."""
    wide = "x" * first + "字" * LONGEST
    path = tmp_path / "long.txt"
    path.write_text(f"{wide}\nnext{' ' * 3 * LONGEST}end \nlast\n{' ' * 2 * LONGEST}\nother\n")
    found = list(lines(str(path)))
    assert "".join(line or "" for line in found[: found.index("next")]) == wide
    assert found[found.index("next") :] == ["next", "end", "last", None, "other", None]


def test_the_line_of_a_wrong_byte_is_its_number_in_the_file(tmp_path: Path):
    (tmp_path / "long.txt").write_bytes(b"one\n" + b"word " * LONGEST + b"\n\xff\n")
    with refused("0xff", "line 3"):
        list(lines(str(tmp_path / "long.txt")))


def test_a_long_row_of_a_dataset_comes_in_pieces_too(monkeypatch: pytest.MonkeyPatch):
    rows = [{"text": "word " * LONGEST + "\nshort"}, {"text": None}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **how: iter(rows))
    found = lines("owner/name")
    first = [next(found) for _ in range(7)]
    assert [line.split()[-1] if line else None for line in first] == ["word"] * 5 + ["short", None]
    with refused("column 'text'", "owner/name"):
        next(found)


def test_a_limit_of_tokens(text: Path, tmp_path: Path):
    made = data.prepare([str(text)], tmp_path, tokens=100 * LENGTH - 3, **HOW)
    assert made.facts["train"]["rows"] == 100
    assert made.facts["train"]["stopped_at_limit"]
    assert not made.facts["valid"]["stopped_at_limit"]


def test_an_array_may_be_carried_compressed(prepared: Path, tmp_path: Path):
    (tmp_path / "data.json").write_bytes((prepared / "data.json").read_bytes())
    (tmp_path / "train.bin.xz").write_bytes(lzma.compress((prepared / "train.bin").read_bytes()))
    assert np.array_equal(load_data(tmp_path).rows("train"), load_data(prepared).rows("train"))


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


def test_a_folder_in_which_another_works_is_refused(text: Path, tmp_path: Path):
    with folder_lock(tmp_path / "out"), pytest.raises(Busy, match=f"^out must be .* got {tmp_path / 'out'}, where one does$"):
        data.prepare([str(text)], tmp_path / "out", **HOW)
    data.prepare([str(text)], tmp_path / "out", **HOW)


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
    archives = {b"no archive": "damaged", lzma.compress(content[:-2]): f"got {len(content) - 2}", lzma.compress(bytes(1 << 28)): "got more"}
    for archive, words in archives.items():
        (tmp_path / "train.bin.xz").write_bytes(archive)
        with no_more_memory_than(1 << 26), refused("train.bin.xz", words, str(tmp_path)):
            load_data(tmp_path).rows("train")


@contextmanager
def no_more_memory_than(size: int) -> Iterator[None]:
    """That Python asks for at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_archive_that_unpacks_to_much_more_is_refused(tmp_path: Path, suffix: str):
    """A word without end, of 64 MiB in some kilobytes; what was unpacked of it until then stays small."""
    content = bytes([97]) * (1 << 26)
    path = tmp_path / f"bomb.txt{suffix}"
    path.write_bytes(gzip.compress(content) if suffix == ".gz" else zstandard.ZstdCompressor().compress(content))
    with no_more_memory_than(1 << 27), refused("text must unpack to at most 200 times its size", str(path)):
        for _ in lines(str(path)):
            pass


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


def test_a_folder_prepared_otherwise_is_not_overwritten(text: Path, tmp_path: Path):
    data.prepare([str(text)], tmp_path, **HOW)
    with refused("length", "32", "16"):
        data.prepare([str(text)], tmp_path, **HOW_ELSE)
    assert json.loads((tmp_path / "request.json").read_text())["length"] == LENGTH
