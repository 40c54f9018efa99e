"""`shaped diagnose`: what it prints, what it writes, and how it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_runner import make_runner
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForQuestionAnswering,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaModel,
)

from loudness import stays_loud
from refusals import refused
from shaped.commands.diagnose import choose_stages, format_value
from shaped.commands.results import draw_table
from shaped.diagnosis.bands import Band
from shaped.diagnosis.models import load_subject

SIZES: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 8}
FUNCTIONS = """
import torch

def model_and_batch():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 16)

def linear():
    return torch.nn.Linear(3, 3), torch.ones(2, 3)

def picky():
    return torch.nn.Linear(3, 3), torch.ones(2, 4)

def model_alone():
    return model_and_batch()[0]

def number():
    return 3

def broken():
    raise RuntimeError("one line" + chr(10) + "and another")

a_number = 3
"""
run = make_runner("diagnose")


@pytest.fixture
def config(tmp_path: Path) -> str:
    place = tmp_path / "small.json"
    place.write_text(json.dumps({"model_type": "gpt2"} | SIZES))
    return str(place)


@pytest.fixture
def functions(tmp_path: Path, monkeypatch) -> str:
    (tmp_path / "functions_to_diagnose.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return "functions_to_diagnose"


def test_a_config_is_initialised_and_judged(monkeypatch, capsys, tmp_path, config):
    out = tmp_path / "out"
    assert run(monkeypatch, config, "--seeds", "2", "--out", str(out)) == 0
    shown = capsys.readouterr().out
    for word in ("small: risk 0.", "correlation", "max logit", "8 models predicted", "random tokens of the vocabulary", "seed 0"):
        assert word in shown
    saved = json.loads((out / "diagnosis.json").read_text())
    assert (saved["info"]["name"], saved["info"]["batch"]) == ("small", "input_ids [2, 8], labels [2, 8]")
    assert saved["loss"]["kind"] == "the model's own loss"
    assert run(monkeypatch, config, "--seeds", "0", "--tokens", "5", "--out", str(out), "--json", "--no-remedies") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["layers"][1]["name"] == "transformer.h.1"
    assert printed["bands_source"] == "no band was asked for"
    assert (saved["remedies"], printed["remedies"]) == ([], None)
    assert "<h1>small: " in (out / "diagnosis.html").read_text()


def test_a_folder_with_weights_and_a_tokenizer(tmp_path):
    torch.manual_seed(11)
    model = GPT2LMHeadModel(GPT2Config(**SIZES, bos_token_id=None, eos_token_id=None))
    model.save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(40)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{number % 7 + 1}" for number in range(17)))
    with stays_loud():
        subject = load_subject(str(tmp_path), text=text, tokens=4, sequences=3)
    assert subject.batch["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 1], [2, 3, 4, 5]]
    weight = "transformer.h.1.attn.c_attn.weight"
    assert torch.equal(subject.model.get_parameter(weight), model.get_parameter(weight))
    assert isinstance(subject.model, GPT2LMHeadModel)


def test_a_shaped_config_where_nothing_else_has_loaded_our_models(tmp_path):
    place = tmp_path / "ours.json"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40, "max_position_embeddings": 8}
    place.write_text(json.dumps({"model_type": "shaped"} | sizes))
    program = "import sys; from shaped.diagnosis.models import load_subject; print(type(load_subject(sys.argv[1]).model).__name__)"
    ended = subprocess.run([sys.executable, "-c", program, str(place)], capture_output=True, text=True, check=False)
    assert ended.stdout == "ShapedForMaskedLM\n", ended.stderr


def test_a_function(monkeypatch, capsys, tmp_path, functions):
    assert run(monkeypatch, f"{functions}:model_and_batch", "--seeds", "1", "--out", str(tmp_path / "out")) == 0
    shown = capsys.readouterr().out
    assert "a fixed random projection of the output" in shown
    assert "the batch of the function" in shown


def test_the_seed_is_also_that_of_a_function(functions):
    one, again, other = (load_subject(f"{functions}:model_and_batch", seed=seed).batch for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_seed_may_have_any_size(monkeypatch, capsys, tmp_path, config, functions):
    """torch takes 64 bits: the command had blamed the model, and `diagnose` had left out the band."""
    for model in (config, f"{functions}:model_and_batch"):
        assert run(monkeypatch, model, "--seed", str(10**20), "--seeds", "1", "--no-remedies", "--out", str(tmp_path / "out")) == 0
        assert f"seed {10**20}" in capsys.readouterr().out
        stacks = json.loads((tmp_path / "out" / "diagnosis.json").read_text())["stacks"]
        assert all(stack["bands"] for stack in stacks.values())


@pytest.mark.parametrize("line", ["os.chdir('..')", "sys.path.remove(os.getcwd())"])
def test_a_module_that_changes_the_folder_or_the_path(tmp_path, monkeypatch, line):
    (tmp_path / "changing_module.py").write_text(f"import os, sys\n{line}\n{FUNCTIONS}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "changing_module", raising=False)
    before = list(sys.path)
    assert load_subject("changing_module:model_and_batch").about == "the batch of the function"
    assert sys.path == before
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "changing_module")
    with refused("model", "changing_module:missing", "AttributeError"):
        load_subject("changing_module:missing")


def test_folders_of_other_tasks_and_with_missing_weights(tmp_path):
    small: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 20}
    config = RobertaConfig(**small, max_position_embeddings=12)
    for kind in (RobertaForSequenceClassification, RobertaForTokenClassification, RobertaForQuestionAnswering):
        kind(config).save_pretrained(tmp_path / kind.__name__)
        subject = load_subject(str(tmp_path / kind.__name__))
        assert type(subject.model) is kind
        assert subject.batch.keys() == {"input_ids"}
        assert subject.batch["input_ids"].shape == (2, 10)  # positions 0 and 1 of RoBERTa's table are not for tokens
        subject.model(**subject.batch)
        assert "drawn" not in subject.about
    RobertaModel(config).save_pretrained(tmp_path / "headless")
    place = tmp_path / "headless" / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"architectures": ["RobertaForMaskedLM"]}))
    one, again = (load_subject(str(tmp_path / "headless")) for _ in range(2))
    assert "weights are not in the folder and were drawn, such as lm_head" in one.about
    assert torch.equal(one.model.get_parameter("lm_head.dense.weight"), again.model.get_parameter("lm_head.dense.weight"))


def test_bad_input_is_one_line_before_anything_is_written(monkeypatch, capsys, tmp_path, config, functions):
    out, wrong = tmp_path / "out", tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"model_type": "no such model"}))
    (tmp_path / "not_python.py").write_text("def make(:")
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "image_size": 4, "patch_size": 2}
    images, sizeless = tmp_path / "images.json", tmp_path / "sizeless.json"
    images.write_text(json.dumps({"model_type": "vit"} | small))
    sizeless.write_text(json.dumps({"model_type": "segformer", "hidden_sizes": [8, 8, 8, 8], "num_attention_heads": [1, 1, 1, 1]}))
    for arguments, word in (
        ([str(tmp_path / "none")], "model must be a folder with a config.json"),
        ([str(tmp_path)], "model must be a folder with a config.json"),
        ([str(wrong)], "model must be one that transformers can load"),
        (["no_such_package.models:make"], "model must be a function that can be imported"),
        ([f"{functions}:missing"], "model must be a function that can be imported"),
        ([f"{functions}:broken"], "model must be a function that runs"),
        ([f"{functions}:a_number"], "model must be a function, as"),
        (["not_python:make"], "SyntaxError"),
        ([str(images), "--tokens", "4"], "tokens must not be given for a model of images"),
        ([str(sizeless)], "model must have an image_size"),
        ([f"{functions}:number"], "returns a torch.nn.Module"),
        ([f"{functions}:model_alone"], "its function must return a batch too"),
        ([f"{functions}:model_and_batch", "--tokens", "4"], "tokens must not be given"),
        ([config, "--tokens", "0"], "tokens must be at least 2"),
        ([config, "--text", str(tmp_path / "none.txt")], "text must be a file that can be read, got "),
        ([config, "--text", str(wrong)], "tokenizer"),
    ):
        assert run(monkeypatch, *arguments, "--out", str(out)) == 2
        said = capsys.readouterr().err
        assert word in said, arguments
        assert said.count("\n") == 1
    assert not out.exists()
    for arguments, word in (
        ([f"{functions}:linear"], "model must have attention"),
        ([f"{functions}:picky"], "batch must be what Linear takes"),
        ([config, "--tokens", "9"], "tokens must be at most 8, the positions of "),
    ):
        assert run(monkeypatch, *arguments, "--out", str(out)) == 2
        said = capsys.readouterr().err
        assert word in said
        assert said.count("\n") == 1
    assert list(out.iterdir()) == []


def test_rows_and_arrows(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    table = Table("a column of a few words", box=None)
    table.add_row("0.123456789012345678901234567890↑")
    assert "0.123456789012345678901234567890↑" in draw_table(table, whole=True)
    assert choose_stages(3) == [0, 1, 2, 3]
    chosen = choose_stages(96)
    assert (chosen[:2], chosen[-1], len(chosen)) == ([0, 1], 96, 12)
    band = Band([0.1, 0.1], [0.2, 0.2], [0.3, 0.3])
    assert [format_value([0.5, 0.2], band, stage, 1) for stage in (0, 1)] == ["0.5↑", "0.2"]
    assert [format_value([0.05], band, stage, 1) for stage in (0, 1)] == ["", "0.05↓"]
