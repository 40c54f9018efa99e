"""shaped.hf.predict of stock models with shaped attention: against models that transformers makes and `shaped.hf.shape` shapes."""

import json
from pathlib import Path
from typing import Any

import families
import family_gradients
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, PreTrainedConfig

from refusals import refused
from shaped.hf import Prediction, ShapedConfig, predict, shape
from shaped.hf.shaping import has_gains_of_config
from shaped.testing.stats import Z, assert_rejected, seed

IDS = families.make_ids(6)
TINY: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 20}


def make_one_layer(std: float, heads: int) -> PreTrainedConfig:
    """Hardly a feed-forward layer. The larger the initial weights, the more of the residual stream is attention."""
    sizes: dict[str, Any] = {"n_embd": 128, "n_layer": 1, "n_head": heads, "n_inner": 1, "vocab_size": 20, "n_positions": 8}
    return GPT2Config(**sizes, initializer_range=std, bos_token_id=None, eos_token_id=None)


ONE_LAYER = make_one_layer(0.1, 16)
SHAPE: dict[str, Any] = {"tau0": 0.1, "gamma1": 0.8, "gamma2": 1.6, "gamma": 0.7}
MODELS, SAMPLES = 320, 600
"""Each error of 5 % is then expected at 8.6 to 11.5 standard errors."""


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


def test_shaped_models_have_the_predicted_gradients():
    """Small branches, or the last norm hides their weight. The other families: tests/hf/family_gradients.py."""
    config, models = families.shape_stock(make_one_layer(0.006, 2), **SHAPE), 96
    truth = family_gradients.measure_gradients(config, IDS, models, seed(43))

    def check_gradients(shape: dict[str, Any] | None) -> None:
        found = family_gradients.take_logarithms(predict(config, IDS, shape=shape, samples=256, seed=seed(44)).gradients)
        scores = family_gradients.score(truth, found)
        assert families.find_worst(scores) < family_gradients.find_limit(scores, models)

    check_gradients(None)
    for name in ("gamma", "gamma1"):
        assert_rejected(lambda name=name: check_gradients(SHAPE | {name: 1.05 * SHAPE[name]}))


def test_every_way_to_shape_a_model_has_the_same_prediction(tmp_path: Path):
    """The model's config, its folder and the argument, digit by digit; "shaped" by name has the gains 1."""
    how: dict[str, Any] = {"tokens": 4, "samples": 2, "seed": 0}
    config, plain = LlamaConfig(**TINY), predict(LlamaConfig(**TINY), **how)
    by_name = AutoModelForCausalLM.from_config(LlamaConfig(**TINY), attn_implementation="shaped")
    with_gains = shape(AutoModelForCausalLM.from_config(LlamaConfig(**TINY)), **SHAPE)
    for number, (model, given) in enumerate(((by_name, {}), (with_gains, SHAPE))):
        expected = predict(config, **how, shape=given)
        assert not torch.equal(expected.rho[1], plain.rho[1])
        model.save_pretrained(tmp_path / str(number))
        for place in (model.config, tmp_path / str(number)):
            assert torch.equal(predict(place, **how).rho, expected.rho)
        assert expected.info["shape"] == {"tau0": None, "learn": False, "gamma1": 1.0, "gamma2": 1.0, "gamma": 1.0} | given
    assert torch.equal(predict(config, **how).rho, plain.rho)  # the argument leaves the config as it was
    assert plain.info["shape"] is None
    off = predict(config, **how, shape={"gamma1": 0.0, "gamma2": 0.0})
    assert torch.equal(off.rho, plain.rho)


def test_entries_that_a_config_lacks_have_the_defaults_of_shape():
    """As in the model itself: configs of earlier versions have no gamma, and one may be written by hand."""
    config: Any = families.shape_stock(LlamaConfig(**TINY))
    config.shaped = {"gamma1": 0.5}
    expected = predict(LlamaConfig(**TINY), 4, samples=2, shape={"gamma1": 0.5}).rho
    assert torch.equal(predict(config, 4, samples=2).rho, expected)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="shaped")
    assert has_gains_of_config(model, model.config)  # `diagnose` asks
    assert shape(model).config.shaped["instead_of"] == "sdpa"  # it lacks this entry too


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gamma": -1.0}, ["gamma must be positive", "-1"]),
        ({"tau0": 0.0}, ["tau0 must be positive", "0"]),
        ({"gamma1": float("nan")}, ["gamma1 must be finite", "nan"]),
        ({"learn": "no"}, ["learn must be True or False", "'no'"]),
        ({"gama": 0.5}, ["shape must have the arguments of shaped.hf.shape", "gamma2", "'gama'"]),
        (0.5, ["shape must have the arguments of shaped.hf.shape", "0.5"]),
    ],
    ids=str,
)
def test_bad_shapes_are_refused(given, words):
    with refused(*words):
        predict(LlamaConfig(**TINY), 4, samples=2, shape=given)


def test_shapes_that_are_not_in_the_law_are_refused(tmp_path: Path):
    with refused("shape must be None for a ShapedConfig", "0.5"):
        predict(ShapedConfig(**TINY), 4, samples=2, shape={"gamma": 0.5})
    with refused("attn_logit_softcapping must be None for shaped attention", "50"):
        predict(Gemma2Config(**TINY, num_key_value_heads=1), 4, samples=2, shape={})
    dropped = families.shape_stock(LlamaConfig(**TINY))
    dropped._attn_implementation = "sdpa"
    with refused("attn_implementation must be 'shaped'", "'sdpa'", "drops its shaping"):
        predict(dropped, 4, samples=2)
    for entries, words in (
        ({"gamma1": 1.0, "sinks": 2}, ["shaped must have the arguments", "'sinks'"]),
        ("yes", ["shaped must have the arguments", "'yes'"]),
    ):
        config = {"model_type": "llama", "attn_implementation": "shaped", "shaped": entries} | TINY
        (tmp_path / "config.json").write_text(json.dumps(config))
        with refused(*words):
            predict(tmp_path, 4, samples=2)
