"""What is seen of a model in training, against closed forms."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shaped.hf import ShapedConfig, ShapedForMaskedLM
from shaped.train.run import diagnostics, metrics
from shaped.train.run.loop import pretrain
from shaped.train.run.metrics import read_metrics
from shaped.train.run.settings import Settings


def model(**config: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 12,
    }
    return ShapedForMaskedLM(ShapedConfig(**sizes | config))


@pytest.mark.parametrize("block", ["shaped", "preln"])
def test_entropy_of_no_query_is_log_of_the_tokens(block: str):
    made = model(block=block)
    ids = torch.randint(5, 50, (4, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        made.model.layers[1].block.attention.query.weight.zero_()
    seen = diagnostics.observe(made, ids, {})
    assert len(seen["entropy"]) == len(seen["correlation"]) == 3
    assert seen["entropy"][1] == pytest.approx(math.log(12), abs=1e-6)
    assert seen["entropy"][0] < math.log(12) - 1e-6


def test_correlation_of_equal_tokens_is_one():
    made = model()
    with torch.no_grad():
        made.model.embedding.positions.weight.zero_()
    seen = diagnostics.observe(made, torch.full((2, 12), 7), {})
    assert seen["correlation"] == pytest.approx([1.0] * 3, abs=1e-6)
    assert diagnostics.observe(model(), torch.arange(12)[None] + 5, {})["correlation"][-1] < 0.5


def test_gains_and_gradient_norms_by_layer():
    made = model(schedule="learn", gamma=0.3)
    gradients = {
        "model.layers.1.block.attention.query.weight": torch.full((3, 3), 2.0),
        "model.layers.1.block.gamma_attention": torch.tensor([8.0]),
    }
    with torch.no_grad():
        made.model.layers[2].block.attention.shaping.gamma2.fill_(0.25)
    seen = diagnostics.observe(made, torch.full((2, 12), 7), gradients)
    assert seen["gradient_norm"] == pytest.approx([0.0, 10.0, 0.0])
    assert seen["gamma_attention"] == pytest.approx([0.3] * 3)
    assert seen["lam_feedforward"] == pytest.approx([0.91**0.5] * 3)
    assert seen["gamma2"] == [1.0, 1.0, 0.25]
    assert seen["slope"] == pytest.approx([0.75] * 3)
    assert "gamma1" not in diagnostics.observe(model(block="preln"), torch.full((2, 12), 7), {})


def test_metrics_go_to_json_lines_and_tensorboard(tiny: Settings):
    pretrain(replace(tiny, steps=60, tensorboard=True))
    lines = read_metrics(tiny.out / "metrics.jsonl")
    assert [(line["step"], line["kind"]) for line in lines] == [(20, "train"), (40, "train"), (60, "train"), (60, "layers"), (60, "test")]
    assert set(lines[3]) > {"entropy", "correlation", "gradient_norm", "lam_attention", "gamma_feedforward", "gamma1", "gamma2", "slope"}
    events = EventAccumulator(str(tiny.out / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [20, 40, 60]
    assert events.Scalars("entropy/layer 2")[0].value == pytest.approx(lines[3]["entropy"][1], rel=1e-6)


def test_without_tensorboard_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    said: list[str] = []
    metrics.Metrics(tmp_path, 0, True, said.append).write(1, "test", loss=1.0)
    assert len(said) == 1
    assert "tensorboard is not installed" in said[0]
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "kind": "test", "loss": 1.0}]


def test_metrics_of_steps_that_come_again_are_dropped(tmp_path: Path):
    lines = [{"step": step, "kind": "test", "loss": 1.0} for step in (10, 20, 30)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 40, "ki')
    metrics.Metrics(tmp_path, 20, False, print).write(30, "layers", entropy=[float("nan"), 1.0])
    assert read_metrics(tmp_path / "metrics.jsonl") == [*lines[:2], {"step": 30, "kind": "layers", "entropy": [None, 1.0]}]
