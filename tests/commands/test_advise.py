"""`shaped advise`: what it prints, what it writes, and how it refuses."""

import json
from typing import Any

import pytest
from command_runner import make_runner
from transformers import GPTNeoXConfig

import shaped
from refusals import refused
from shaped.advice.question import Question
from shaped.hf import ShapedConfig
from shaped.hf.prediction.sizes import read_sizes

SMALL = ("--width", "8", "--depth", "4", "--tokens", "2", "--heads", "2", "--share", "0.3", "--tau0", "0.5")
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 20}
run = make_runner("advise")


@pytest.fixture
def in_process(monkeypatch):
    """Processes would take longer to start than the work takes."""
    monkeypatch.setattr("os.cpu_count", lambda: None)


def test_advise_writes_sentence_table_picture_and_numbers(monkeypatch, capsys, tmp_path, in_process):
    found: list[shaped.Advice] = []
    library = shaped.advise

    def advise(**given: Any) -> shaped.Advice:
        found.append(library(**given, gammas=(0.1, 0.3)))
        return found[0]

    monkeypatch.setattr(shaped, "advise", advise)
    assert run(monkeypatch, *SMALL, "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    summary = json.loads((tmp_path / "advise.json").read_text())
    (advice,) = found
    assert summary["best"] == json.loads(json.dumps(advice.to_dict()["best"]))
    assert (advice.question.n, advice.question.d, advice.question.m, advice.question.heads) == (8, 4, 2, 2)
    assert (advice.question.share, advice.answer.tau0) == (0.3, 0.5)
    assert str(advice) in shown  # no line is wrapped
    assert all(word in shown for word in ("limit", "Pre-LN", "Post-LN", "unshaped", "gradients", "exact binomial", "seed 0"))
    assert (tmp_path / "advise.png").read_bytes().startswith(b"\x89PNG")
    assert summary["question"]["mask"] == "causal"


def test_sizes_from_a_config_and_json(monkeypatch, capsys, tmp_path):
    ShapedConfig(**SIZES, positions="rope", qk_norm=True, c_minus=-0.5).save_pretrained(tmp_path / "ours")
    (tmp_path / "llama.json").write_text(json.dumps({"model_type": "llama"} | SIZES))
    sizes = read_sizes(tmp_path / "ours", 5)
    ours = {"n": 16, "d": 3, "m": 5, "heads": 2, "mask": None, "qk_norm": True, "rope": 10000.0, "hidden": 24, "c_minus": -0.5}
    assert sizes == ours
    with refused("activation must be 'relu'", "got 'gelu'"):
        read_sizes(ShapedConfig(**SIZES, activation="gelu"), 5)
    with refused("config must rotate all features", "got 2 of 8"):
        read_sizes(GPTNeoXConfig(**SIZES), 5)
    assert {"mask": "causal", "qk_norm": False, "hidden": 24}.items() <= read_sizes(tmp_path / "llama.json", 5).items()
    Question(**read_sizes(tmp_path / "llama.json", 5))
    asked: dict[str, Any] = {}

    def refuse_to_work(**given: Any) -> None:
        asked.update(given)
        raise ValueError("enough")

    monkeypatch.setattr(shaped, "advise", refuse_to_work)
    assert run(monkeypatch, "--config", str(tmp_path / "ours"), "--tokens", "5", "--json", "--workers", "1", "--out", str(tmp_path)) == 2
    assert sizes.items() <= asked.items()
    assert asked["progress"] is False
    capsys.readouterr()
    assert run(monkeypatch, "--config", str(tmp_path / "ours"), "--c-minus", "-1", "--out", str(tmp_path)) == 2
    assert "c_minus must be left out with a config" in capsys.readouterr().err
    assert run(monkeypatch, "--config", str(tmp_path / "ours"), "--tokens", "99", "--out", str(tmp_path)) == 2
    assert "tokens must be at most 16, the width of the config, got 99" in capsys.readouterr().err
    assert (
        run(
            monkeypatch,
            "--config",
            str(tmp_path / "llama.json"),
            "--tokens",
            "5",
            "--c-minus",
            "-2",
            "--workers",
            "1",
            "--out",
            str(tmp_path),
        )
        == 2
    )
    assert asked["c_minus"] == -2.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--depth", "4"), ("width must be given",)),
        (("--width", "0", "--depth", "4"), ("width must be at least 1, got 0",)),
        (("--width", "8", "--depth", "0"), ("depth must be at least 1, got 0",)),
        (("--width", "8", "--depth", "4"), ("width must be at least 128, the number of tokens, got 8",)),
        ((*SMALL, "--tokens", "1"), ("tokens must be at least 2, got 1",)),
        (("--width", "8"), ("depth must be given",)),
        ((*SMALL, "--tau0", "1;2"), ("tau0 must be numbers separated by commas", "'1;2'")),
        ((*SMALL, "--mask", "triangular"), ("mask must be causal, alibi or a .npy file", "'triangular'")),
        ((*SMALL, "--config", "here"), ("width must be left out with a config", "got 8")),
        (("--config", "nowhere.json"), ("config must be a folder", "'nowhere.json'")),
        (("--config", "nowhere.json", "--heads", "0"), ("heads must be left out with a config", "got 0")),
        (("--config", "nowhere.json", "--qk-norm"), ("qk_norm must be left out with a config",)),
        ((*SMALL, "--heads", "3"), ("heads must divide", "got 3")),
        ((*SMALL, "--workers", "0"), ("workers must be at least 1",)),
    ],
)
def test_wrong_options_are_refused_in_one_line(monkeypatch, capsys, tmp_path, arguments: tuple[str, ...], words: tuple[str, ...]):
    assert run(monkeypatch, *arguments, "--out", str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert said.startswith("shaped: ")
    assert said.count("\n") == 1
    assert all(word in said for word in words)
