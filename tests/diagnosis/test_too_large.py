"""Models for which there is no memory are refused before they are made: Linux would kill the process, without a word."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import shaped
from refusals import refused
from shaped import process
from shaped.diagnosis import memory
from shaped.diagnosis.models import load_subject
from shaped.hf import ShapedConfig
from shaped.train.run.model import check_size

LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40}
SMALL: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2}


def let_free(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    for module in (process, memory):
        monkeypatch.setattr(module, "find_free_memory", lambda: int(size))


def test_a_config_is_refused_before_it_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = tmp_path / "config.json"
    place.write_text(json.dumps(LLAMA | {"num_hidden_layers": 40, "vocab_size": 32_000}))
    build = AutoModelForCausalLM.from_config

    def build_on_meta(*args: Any, **kwargs: Any) -> Any:
        if torch.get_default_device().type != "meta":
            raise RuntimeError("it is built in memory")
        return build(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", build_on_meta)
    let_free(monkeypatch, 23e9)
    with refused("model must fit into the 23 GB", "13 billion weights and gradients of 104 GB", "fewer layers, or `shaped predict`"):
        load_subject(str(place))
    let_free(monkeypatch, 60e9)
    with refused("fewer layers", '"dtype": "bfloat16" in its config.json', "`shaped predict`"):
        load_subject(str(place))
    place.write_text(json.dumps(LLAMA | {"num_hidden_layers": 40, "vocab_size": 32_000, "dtype": "bfloat16"}))
    with refused("it is built in memory"):
        load_subject(str(place))


def test_a_folder_is_refused_before_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = GPT2LMHeadModel(GPT2Config(n_positions=8, **SMALL))
    model.save_pretrained(tmp_path)
    let_free(monkeypatch, 2 * 4 * model.num_parameters() - 1)
    with refused("model must fit into", '"dtype": "bfloat16"'):
        load_subject(str(tmp_path))
    let_free(monkeypatch, 2 * 4 * model.num_parameters())
    assert load_subject(str(tmp_path)).batch["input_ids"].shape == (2, 8)


def test_gradients_and_copies_need_memory_too(monkeypatch: pytest.MonkeyPatch):
    model, batch = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2), torch.randn(2, 5, 16)
    size = sum(4 * parameter.numel() for parameter in model.parameters())
    let_free(monkeypatch, 1.5 * size)
    found = shaped.diagnose(model, batch, seeds=2)
    assert found.bands.source.startswith("no band: a copy and its gradients take")
    let_free(monkeypatch, 0.5 * size)
    with refused("model must fit into", "gradients", "bfloat16"):
        shaped.diagnose(model, batch)
    let_free(monkeypatch, 2 * size)
    assert shaped.diagnose(model, batch, seeds=2).bands.stacks
    let_free(monkeypatch, 1000)
    spread_out = nn.Sequential(nn.Linear(4, 4), nn.Linear(1000, 1000, device="meta"))  # as of several devices: only the first is here
    memory.check_gradients(spread_out)
    assert not memory.find_lack_of_copies(spread_out)


def test_training_is_refused_before_its_model_is_built(monkeypatch: pytest.MonkeyPatch):
    let_free(monkeypatch, 20e9)
    config = ShapedConfig(vocab_size=100, hidden_size=8192, num_hidden_layers=16, num_attention_heads=64)
    with refused("model must fit into the 20 GB", "12.9 billion weights, gradients and moments of 206 GB", "width or depth"):
        check_size(config, "cpu")
    check_size(ShapedConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=2), "cpu")
