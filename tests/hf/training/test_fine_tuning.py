"""New heads on the body of a masked language model, trained by Trainer with the callbacks."""

import math
from typing import Any

import pytest
import torch
from test_trainer import trainer_of
from torch.utils.data import Dataset
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification

from shaped.hf import (
    DiagnosticsCallback,
    ShapedConfig,
    ShapedForMaskedLM,
    ShapedForQuestionAnswering,
    ShapedForTokenClassification,
    ShapingCallback,
    vanilla,
)
from shaped.nn import Recover, gains
from shaped.testing.stats import generator
from shaped.watching.trainer import WatchCallback

SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "type_vocab_size": 2}
HEADS = {ShapedForTokenClassification: "classifier.weight", ShapedForQuestionAnswering: "qa_outputs.weight"}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    ("settings", "std"),
    [
        *(({}, 256**-0.5), ({"dtype": "bfloat16"}, 256**-0.5)),
        *(({"head_std": 0.3}, 0.3), ({"block": "preln", "init": "bert"}, 0.02)),
    ],
)
def test_the_head_alone_is_new(kind: Any, settings, std, tmp_path):
    """It starts as the output matrix of a language model does; 5 standard errors."""
    dtype = getattr(torch, settings.get("dtype", "float32"))
    body = ShapedForMaskedLM(ShapedConfig(**SIZES | settings))
    with torch.no_grad():
        for gain in gains(body).values():
            gain.add_(0.25)
    body.save_pretrained(tmp_path)
    torch.manual_seed(1)
    labels: dict[str, Any] = {} if kind is ShapedForQuestionAnswering else {"num_labels": 20}
    loaded: Any = kind.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True, **labels)
    model, found = loaded
    assert found["missing_keys"] == {HEADS[kind]}
    assert not found["unexpected_keys"]
    assert all(torch.equal(value.to(dtype), model.model.state_dict()[name]) for name, value in body.model.state_dict().items())
    head = model.get_parameter(HEADS[kind])
    assert head.dtype == dtype
    assert head.float().square().mean().item() == pytest.approx(std**2, rel=5 * math.sqrt(2 / head.numel()))


class Sentences(Dataset):
    """A label for each token by its type and whether it is even; the answer is from token 38 to token 39. The end is padding."""

    def __init__(self, kind: type):
        self.ids = torch.randint(2, 38, (160, 12), generator=generator(3))
        self.starts = torch.randint(1, 7, (160,), generator=generator(4))
        self.ids[torch.arange(160), self.starts], self.ids[torch.arange(160), self.starts + 2] = 38, 39
        self.types = (torch.arange(12) >= torch.randint(2, 10, (160, 1), generator=generator(5))).long()
        self.mask = (torch.arange(12) < 10).long()
        self.tags = (self.ids % 2 + 2 * self.types).masked_fill(self.mask == 0, -100)
        self.kind = kind

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        row = {"input_ids": self.ids[i], "attention_mask": self.mask, "token_type_ids": self.types[i]}
        if self.kind is ShapedForTokenClassification:
            return row | {"labels": self.tags[i]}
        return row | {"start_positions": self.starts[i], "end_positions": self.starts[i] + 2}


@pytest.mark.parametrize(
    ("kind", "auto"),
    [(ShapedForTokenClassification, AutoModelForTokenClassification), (ShapedForQuestionAnswering, AutoModelForQuestionAnswering)],
)
def test_trainer_fine_tunes_and_the_shaping_recovers(kind, auto, tmp_path):
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES | {"hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 12, "num_labels": 4}
    model = kind(ShapedConfig(**sizes, gamma=0.7))
    data, watch, diagnostics = Sentences(kind), WatchCallback(every=20), DiagnosticsCallback(every=20)
    trainer = trainer_of(model, tmp_path, [ShapingCallback(Recover(30)), diagnostics, watch], steps=60, rate=1e-2, data=data, batch=32)
    trainer.train()
    predicted: Any = trainer.predict(data)
    assert predicted.metrics["test_loss"] < 0.1
    assert watch.watcher is not None
    assert len(diagnostics.history) == len(watch.watcher.rows) == 3
    batch = {name: torch.stack([data[i][name] for i in range(160)]) for name in ("input_ids", "attention_mask", "token_type_ids")}
    plain = vanilla(model).eval()
    plain.save_pretrained(tmp_path / "plain")
    again = auto.from_pretrained(tmp_path / "plain")
    assert type(again) is kind
    with torch.no_grad():
        found, expected = again(**batch).to_tuple(), model.eval()(**batch).to_tuple()
        without = model(batch["input_ids"], batch["attention_mask"])[0]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not torch.allclose(without, expected[0], atol=1e-2)  # so what Trainer gives has the types
    logits = predicted.predictions if isinstance(predicted.predictions, tuple) else (predicted.predictions,)
    assert all(torch.allclose(torch.tensor(one), other, atol=1e-5) for one, other in zip(logits, expected, strict=True))
