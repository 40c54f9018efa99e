"""GLUE: the three file formats, the three scores, and fine-tuning that learns."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from loudness import stays_loud
from refusals import refused
from shaped.commands import app as cli
from shaped.files import read_json, write_json
from shaped.train import glue
from shaped.train.run.loop import pretrain
from shaped.train.run.settings import Settings
from shaped.train.run_records import collect, read_runs
from shaped.train.tables import table2


def test_cola_has_no_header(tmp_path: Path):
    (tmp_path / "CoLA").mkdir()
    (tmp_path / "CoLA" / "train.tsv").write_text('gj04\t1\t\tThe "sailors rode.\ngj04\t0\t*\tHe laughed to.\n')
    assert glue.read_examples("cola", "train", tmp_path) == [('The "sailors rode.', None, 1), ("He laughed to.", None, 0)]


def test_mrpc_has_a_header_and_bare_quotes(tmp_path: Path):
    (tmp_path / "MRPC").mkdir()
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    (tmp_path / "MRPC" / "dev.tsv").write_text(header + '1\t7\t8\tHe said "no .\t" No , he said .\n0\t9\t10\tOne .\tTwo .\n')
    assert glue.read_examples("mrpc", "dev", tmp_path) == [('He said "no .', '" No , he said .', 1), ("One .", "Two .", 0)]


def test_rte_has_labels_in_words(tmp_path: Path):
    (tmp_path / "RTE").mkdir()
    header = "index\tsentence1\tsentence2\tlabel\n"
    (tmp_path / "RTE" / "train.tsv").write_text(header + "0\tA b.\tB.\tentailment\n1\tC d.\tE.\tnot_entailment\n")
    assert glue.read_examples("rte", "train", tmp_path) == [("A b.", "B.", 0), ("C d.", "E.", 1)]


def test_from_datasets(monkeypatch: pytest.MonkeyPatch):
    def fake(name: str, task: str, split: str):
        assert (name, task, split) == ("nyu-mll/glue", "mrpc", "validation")
        return [{"sentence1": "a", "sentence2": "b", "label": 1, "idx": 0}]

    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert glue.read_examples("mrpc", "dev", None) == [("a", "b", 1)]


def test_wrong_files_are_refused(tmp_path: Path):
    with refused("CoLA/dev.tsv"):
        glue.read_examples("cola", "dev", tmp_path)
    (tmp_path / "CoLA").mkdir()
    for content, words in (("gj04\t2\t\tSome.\n", ("labels 0, 1", "line 1")), ("only one\n", ("line 1", "only one")), ("", ("none",))):
        (tmp_path / "CoLA" / "dev.tsv").write_text(content)
        with refused("dev.tsv", *words):
            glue.read_examples("cola", "dev", tmp_path)
    (tmp_path / "CoLA" / "dev.tsv").write_bytes("gj04\t1\t\tcaf\xe9\n".encode("latin-1"))
    with refused("data must have CoLA/dev.tsv", "UTF-8", "0xe9"):
        glue.read_examples("cola", "dev", tmp_path)
    with refused("task", "sst"):
        glue.GlueSettings("sst")
    with refused("seeds"):
        glue.GlueSettings("cola", seeds=())


def test_scores():
    """tp = 4, fn = 2, fp = 1, tn = 3; and Matthews correlation is Pearson's of the labels."""
    truth = np.array([1, 1, 1, 1, 1, 1, 0, 0, 0, 0])
    said = np.array([1, 1, 1, 1, 0, 0, 1, 0, 0, 0])
    found = glue.score(said, truth)
    assert found["accuracy"] == 0.7
    assert found["f1"] == pytest.approx(2 * 4 / (2 * 4 + 1 + 2))
    assert found["matthews"] == pytest.approx((4 * 3 - 1 * 2) / math.sqrt(5 * 6 * 4 * 5))
    assert found["matthews"] == pytest.approx(np.corrcoef(said, truth)[0, 1])
    ones = glue.score(np.ones(10, int), truth)
    assert ones == {"matthews": 0.0, "accuracy": 0.6, "f1": pytest.approx(0.75)}
    assert glue.score(np.zeros(4, int), np.ones(4, int)) == {"matthews": 0.0, "accuracy": 0.0, "f1": 0.0}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """Pairs of texts that share their words, or do not."""
    generator = np.random.default_rng(0)
    words = [consonant + vowel for consonant in "bdfg" for vowel in "aeiou"]
    (tmp_path / "glue" / "RTE").mkdir(parents=True)
    for part, count in (("train", 320), ("dev", 99)):
        rows = ["index\tsentence1\tsentence2\tlabel"]
        for number in range(count):
            label = int(generator.integers(2))
            chosen = generator.choice(words[10 * label : 10 * label + 10], 6)
            rows.append(f"{number}\t{' '.join(chosen[:3])}\t{' '.join(chosen[3:])}\t{('entailment', 'not_entailment')[label]}")
        (tmp_path / "glue" / "RTE" / f"{part}.tsv").write_text("\n".join(rows) + "\n")
    return tmp_path / "glue"


@pytest.mark.parametrize("model", ["shaped", "preln"])
def test_fine_tuning_learns_a_task(
    tiny: Settings, task: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Which words a text has decides: above 90 % of 99 examples after 4 epochs, where guessing has 50 %. From the command line."""
    pretrain(replace(tiny, model=model, steps=60))
    arguments = ["shaped", "glue", str(tiny.out), "--task", "rte", "--data", str(task), "--seeds", "0,1", "--epochs", "4", "--lr", "3e-3"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    assert "over 2 seeds" in capsys.readouterr().out
    written = json.loads((tiny.out / "glue-rte.json").read_text())
    assert len(written["accuracy"]["values"]) == 2
    assert min(written["accuracy"]["values"]) > 0.9
    assert written["examples"] == {"train": 320, "dev": 99}
    assert written["run"].startswith("shaped pretrain")
    rows = table2(read_runs([tiny.out]))
    assert (rows[0]["name"], rows[0]["task"], rows[0]["seeds"]) == ("recover" if model == "shaped" else "preln", "rte", 2)
    assert rows[0]["mean"] == written["accuracy"]["mean"]
    collect(read_runs([tiny.out]), tiny.out.parent / "all.json")
    assert table2(read_runs([tiny.out.parent / "all.json"])) == rows


def test_the_same_seed_gives_the_same_scores_whatever_came_before(tiny: Settings, task: Path):
    pretrain(replace(tiny, steps=20))
    both = glue.glue(tiny.out, glue.GlueSettings("rte", epochs=1, seeds=(3, 4), device="cpu"), task, log=lambda line: None)
    alone = glue.glue(tiny.out, glue.GlueSettings("rte", epochs=1, seeds=(4,), device="cpu"), task, log=lambda line: None)
    for name in ("matthews", "accuracy", "f1"):
        assert alone[name]["values"] == both[name]["values"][1:]


def test_a_run_and_its_classifier_leave_transformers_as_loud_as_it_was(tiny: Settings):
    with stays_loud():
        pretrain(replace(tiny, steps=20))
    with stays_loud():
        glue.load_classifier(tiny.out, 0)


@pytest.mark.parametrize("name", ["device", "precision", "stream", "compile", "graph", "attention"])
def test_choices_are_those_of_pre_training(name: str):
    wrong: tuple[Any, ...] = ("fast", "", 1, None)
    for value in wrong:
        with refused(name, ", ".join(Settings.__dataclass_fields__[name].metadata["choices"]) if isinstance(value, str) else "text"):
            replace(glue.GlueSettings("rte"), **{name: value})
    assert getattr(glue.GlueSettings("rte"), name) == Settings.__dataclass_fields__[name].default


@pytest.mark.parametrize(
    "given",
    [
        {"clip": -1.0},
        {"clip": math.nan},
        {"epochs": 0},
        {"epochs": 10**9},
        {"batch": 1.5},
        {"lr": 0.0},
        {"warmup": 2.0},
        {"seeds": (1.5,)},
        {"seeds": (-1,)},
    ],
)
def test_wrong_settings_are_refused(given: dict):
    with refused(next(iter(given))):
        glue.GlueSettings("rte", **given)


def test_a_result_of_any_shape_is_refused_in_a_line(tiny: Settings, task: Path):
    pretrain(replace(tiny, steps=4), log=lambda line: None)
    path = tiny.out / "result.json"
    right = json.loads(path.read_text())
    wrong: list[Any] = [[], 3, None, "x", {}, right | {"more": 1}]
    wrong += [right | {key: value} for key in right for value in (None, [], True, {} if not isinstance(right[key], dict) else 1)]
    wrong += [{other: right[other] for other in right if other != key} for key in ("steps", "command", "test_loss")]
    for content in [*map(json.dumps, wrong), "", "{", "[" * 100_000]:
        path.write_text(content)
        with refused("result.json", "shaped pretrain"):
            glue.glue(tiny.out, glue.GlueSettings("rte", epochs=1), task)


@pytest.mark.parametrize("hashed", [True, False])
def test_a_damaged_model_is_refused_in_a_line(tiny: Settings, task: Path, hashed: bool):
    """By its hash; by what is wrong with it in a run from before there were hashes."""
    pretrain(replace(tiny, steps=4), log=lambda line: None)
    if not hashed:
        about = read_json(tiny.out / "result.json")
        del about["files"]
        write_json(tiny.out / "result.json", about)
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"):
        right = (tiny.out / name).read_bytes()
        flipped = right[:-2] + bytes([right[-2] ^ 1]) + right[-1:]
        for wrong in (right[: len(right) // 2], b"[]", b"", *([flipped] if hashed else [])):
            (tiny.out / name).write_bytes(wrong)
            with refused(str(tiny.out)):
                glue.glue(tiny.out, glue.GlueSettings("rte", epochs=1, seeds=(0,)), task, log=lambda line: None)
        (tiny.out / name).write_bytes(right)
    config = json.loads((tiny.out / "config.json").read_text())
    for wrong in ({"num_hidden_layers": 10**9}, {"hidden_size": 10**9}, {"num_hidden_layers": "2"}):
        (tiny.out / "config.json").write_text(json.dumps(config | wrong))
        with refused("config.json"):
            glue.glue(tiny.out, glue.GlueSettings("rte", epochs=1, seeds=(0,)), task, log=lambda line: None)


def test_an_unfinished_run_is_refused(tmp_path: Path, task: Path):
    with refused("run", "result.json"):
        glue.glue(tmp_path, glue.GlueSettings("rte"), task)
