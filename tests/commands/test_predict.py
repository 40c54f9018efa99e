"""`shaped predict`: what it prints, what it writes, and how it refuses."""

import json
from typing import Any

import numpy as np
import pytest
from command_runner import make_runner

from shaped.commands.predict import choose_names, format_measured, format_power, read_shape
from shaped.hf import Prediction, ShapedConfig, predict

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 20}
run = make_runner("predict")


@pytest.fixture
def configs(tmp_path) -> list[str]:
    """A file and a folder, of two families."""
    (tmp_path / "small.json").write_text(json.dumps({"model_type": "llama"} | SIZES))
    ShapedConfig(**SIZES, max_position_embeddings=8).save_pretrained(tmp_path / "ours")
    return [str(tmp_path / "small.json"), str(tmp_path / "ours")]


def test_predict_writes_table_picture_and_numbers(monkeypatch, capsys, tmp_path, configs):
    out = tmp_path / "out"
    assert run(monkeypatch, *configs, "--tokens", "4", "--samples", "5", "--seed", "2", "--out", str(out)) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("small", "ours", "rho", "length", "entropy", "rank", "5 models"))
    assert sorted(path.name for path in out.iterdir()) == ["ours.npz", "predict.json", "predict.png", "small.npz"]
    assert (out / "predict.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((out / "predict.json").read_text())
    found = predict(configs[0], 4, samples=5, seed=2)
    assert summary["models"]["small"]["rho"]["mean"] == found.rho.mean(1).tolist()
    assert len(summary["models"]["small"]["entropy"]["mean"]) == 3
    assert Prediction.load(out / "ours.npz").info["model_type"] == "shaped"


def test_stock_models_are_shaped(monkeypatch, capsys, tmp_path, configs):
    how = (configs[0], "--tokens", "4", "--samples", "2", "--out", str(tmp_path / "out"), "--json", "--shape")
    assert run(monkeypatch, *how, "--gamma", "0.5", "--gamma1", "0.9", "--gamma2", "0.8", "--tau0", "0.3") == 0
    printed = json.loads(capsys.readouterr().out)
    shape = {"gamma": 0.5, "gamma1": 0.9, "gamma2": 0.8, "tau0": 0.3}
    assert printed["settings"]["shape"] == shape
    assert printed["models"]["small-shaped"]["rho"]["mean"] == predict(configs[0], 4, samples=2, shape=shape).rho.mean(1).tolist()
    assert (read_shape(True, gamma=None), read_shape(False, gamma=None)) == ({}, None)  # --shape alone has the gains 1


def test_tokens_from_a_file_and_json(monkeypatch, capsys, tmp_path, configs):
    np.save(tmp_path / "ids.npy", np.array([3, 3, 3]))
    assert run(monkeypatch, configs[0], "--tokens", str(tmp_path / "ids.npy"), "--samples", "1", "--out", str(tmp_path), "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    model = printed["models"]["small"]
    assert (model["tokens"], model["tokens_given_as"]) == (3, "ids")
    assert model["rho"]["standard_error"] == [None] * 4
    assert model["rho"]["mean"][0] == pytest.approx(1.0, abs=1e-3)  # one token three times


def test_tokens_that_one_config_cannot_have_are_refused_before_the_work(monkeypatch, tmp_path, configs):
    """The second model has eight positions."""
    monkeypatch.setattr("shaped.hf.prediction.simulation.Simulation.run", lambda *_: pytest.fail("began to work"))
    assert run(monkeypatch, *configs, "--tokens", "9", "--out", str(tmp_path / "out")) == 2


def test_bad_input_is_one_line_before_anything_is_written(monkeypatch, capsys, tmp_path, configs):
    (tmp_path / "wrong.json").write_text(json.dumps({"model_type": "llama", "hidden_act": "prelu"} | SIZES))
    out = tmp_path / "out"
    for arguments, word in (
        ([configs[0], str(tmp_path / "wrong.json"), "--tokens", "4"], "hidden_act must be one of"),
        ([*configs, "--tokens", "9"], f", got 9 (for {configs[1]})"),
        ([configs[0], "--tokens", "many"], "tokens must be a number or a .npy file"),
        ([*configs, "--tokens", "1"], "tokens must be at least 2, got 1\n"),
        ([configs[0], "--gamma", "0.5"], "gamma must be left out without --shape, got 0.5"),
        ([*configs, "--shape", "--gamma", "-1"], "gamma must be positive and finite and in [1e-30, 1e+30], got -1.0\n"),
        ([*configs, "--tokens", "4", "--shape"], f"got {{}} (for {configs[1]})"),
        ([configs[1], "--shape"], "shape must be None for a ShapedConfig, which has its own shape, got {}\n"),
        ([str(tmp_path / "none")], "config must be a folder with a config.json"),
    ):
        assert run(monkeypatch, *arguments, "--out", str(out)) == 2
        said = capsys.readouterr().err
        assert word in said
        assert said.count("\n") == 1
    assert not out.exists()


def test_names_and_numbers():
    assert choose_names(["a", "b", "a", "predict"]) == ["a", "b", "a-2", "predict-2"]
    assert format_measured({"mean": [0.70123], "standard_error": [0.0432]}, 0) == "0.701(43)"
    assert format_measured({"mean": [239.144], "standard_error": [1.28]}, 0) == "239.1(13)"
    assert format_measured({"mean": [0.028283], "standard_error": [6e-5]}, 0) == "0.0283(1)"
    assert format_measured({"mean": [0.028283], "standard_error": [1.4e-5]}, 0) == "0.02828(1)"  # not (0), as if it were exact
    assert format_measured({"mean": [3.2056789], "standard_error": [8.6e-6]}, 0) == "3.205679(9)"
    assert format_measured({"mean": [1.0], "standard_error": [3e-8]}, 0) == "1.000000(<1)"
    assert format_power({"mean": [1.234567e-5], "standard_error": [2e-10]}, 0) == "1.23457(2)e-5"
    assert format_measured({"mean": [1.0], "standard_error": [0.0]}, 0) == "1"
    assert format_measured({"mean": [1.0], "standard_error": [None]}, 0) == "1"
    assert format_measured({"mean": [1.0], "standard_error": [None]}, 1) == ""
