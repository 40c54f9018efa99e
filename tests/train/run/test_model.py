"""The model of a run has what its settings say, and nothing of what it has no use for."""

from typing import Any

import pytest

from shaped.hf import ShapedForMaskedLM
from shaped.train.run.model import build_model
from shaped.train.run.settings import Settings

WIDTH, HEADS = 64, 2
USUAL = (WIDTH // HEADS) ** -0.5


@pytest.mark.parametrize(
    ("given", "scale", "fields"),
    [
        ({"tau0": 0.5}, USUAL, {"tau0": 0.5}),  # in the weights
        ({"norm": "rms", "dyt_alpha": 0.3}, USUAL, {"norm": "layer", "dyt_alpha": 0.5, "tau0": 0.01}),
        ({"norm": "rms", "embedding_norm": True}, USUAL, {"norm": "rms"}),
        ({"qk_norm": True, "qk_gain": True}, USUAL, {"tau0": 0.125, "qk_norm": True, "qk_gain": True}),
        ({"qk_norm": True, "tau0": 0.5}, USUAL / 4, {"tau0": 0.5}),
        ({"model": "preln", "norm": "rms", "qk_norm": True, "tau0": 0.5, "init": "gpt2"}, USUAL, {"norm": "rms", "init": "gpt2"}),
        ({"model": "vanilla", "qk_norm": True, "tau0": 0.5}, USUAL, {"block": "vanilla", "tau0": 0.125}),
        ({"model": "dyt", "norm": "rms", "dyt_alpha": 0.3, "embedding_norm": True}, USUAL, {"norm": "layer", "dyt_alpha": 0.3}),
    ],
)
def test_a_model_has_the_settings_that_it_uses(given: dict[str, Any], scale: float, fields: dict[str, Any]):
    settings = Settings.of({"data": "d", "out": "o", "depth": 1, "width": WIDTH, "heads": HEADS} | given)
    model = build_model(settings, ShapedForMaskedLM, vocab=20, length=8)
    assert {name: getattr(model.config, name) for name in fields} == fields
    assert model.model.layers[0].block.attention.scale == pytest.approx(scale)
