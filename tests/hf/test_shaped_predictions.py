"""shaped.hf.predict of stock models with shaped attention: against models that transformers makes and `shaped.hf.shape` shapes."""

import json
from pathlib import Path
from typing import Any, cast

import families
import family_gradients
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, Gemma2Config, GPT2Config, LlamaConfig

from refusals import refused
from shaped.hf import Prediction, ShapedConfig, predict, shape
from shaped.testing.stats import Z, assert_rejected, seed

IDS = families.make_ids(6)
TINY: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 20}
ONE_LAYER = GPT2Config(
    n_embd=128, n_layer=1, n_head=16, n_inner=1, vocab_size=20, n_positions=8, initializer_range=0.1, bos_token_id=None, eos_token_id=None
)
"""Attention is nearly all that the residual stream has after it."""
SHAPE: dict[str, Any] = {"tau0": 0.1, "gamma1": 0.8, "gamma2": 1.6, "gamma": 0.7}
MODELS, SAMPLES = 256, 600


@pytest.fixture(scope="module")
def truth() -> dict[str, torch.Tensor]:
    """What layers of real models measure, shaped as users shape them."""
    found: list[dict[str, torch.Tensor]] = []
    for number in range(MODELS):
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed(41) + number)
            model = shape(AutoModel.from_config(ONE_LAYER), **SHAPE).eval()
            found.append(families.measure_model(model, model.config, IDS))
    return {name: torch.stack([one[name] for one in found], 1) for name in families.QUANTITIES}


def check_means(truth: dict[str, torch.Tensor], prediction: Prediction) -> None:
    """Within Z standard errors of both, and the rounding of float32."""
    worst = families.find_worst(families.score(truth, prediction))
    assert worst < Z, worst


def test_shaped_models_have_the_predicted_law(truth):
    """Deeper models, and the other families: tests/hf/families.py."""
    check_means(truth, predict(ONE_LAYER, IDS, shape=SHAPE, samples=SAMPLES, seed=seed(42)))


@pytest.mark.parametrize("name", SHAPE)
def test_a_shape_that_is_five_percent_off_is_rejected(truth, name):
    wrong = predict(ONE_LAYER, IDS, shape=SHAPE | {name: 1.05 * SHAPE[name]}, samples=SAMPLES, seed=seed(42))
    assert_rejected(lambda: check_means(truth, wrong))
