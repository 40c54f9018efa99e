"""Rotary positions of the package's models: no table, any length, the variance of the embedding, old configs."""

import json

import pytest
import torch
from test_models import VOCABULARY, N, config, made, tokens
from transformers import AutoModelForCausalLM

from refusals import refused
from shaped.hf import ShapedConfig, ShapedForCausalLM, ShapedForMaskedLM, ShapedModel


def test_there_is_no_table_and_the_embedding_has_variance_1():
    model = made(ShapedModel, positions="rope", vocab_size=2000)
    assert not any("positions" in name for name in model.state_dict())
    assert model.embedding.tokens.weight.var().item() == pytest.approx(1.0, rel=5 * (2 / (2000 * N)) ** 0.5)
    assert config(positions="rope", type_vocab_size=2).choose_table_std() == 2**-0.5
    assert config(positions="rope").weights() == config().weights() - 24 * N


@pytest.mark.parametrize("kind", [ShapedForCausalLM, ShapedForMaskedLM])
def test_order_matters_and_only_by_differences(kind):
    """Without positions, permuted tokens of an encoder have permuted outputs."""
    model, ids = made(kind, positions="rope").double(), tokens(batch=1)
    places = torch.arange(9)[None]
    logits = model(ids).logits
    assert (model(ids, position_ids=places + 100).logits - logits).abs().max() < 1e-4  # angles are float32
    assert (model(ids, position_ids=2 * places).logits - logits).abs().max() > 1e-2


def test_longer_inputs_than_in_training_are_not_refused():
    model = made(ShapedForCausalLM, positions="rope")
    assert model(tokens(length=30)).logits.shape == (2, 30, VOCABULARY)
    with refused("input_ids", "24", "30"):
        made(ShapedForCausalLM)(tokens(length=30))


def test_saved_and_loaded_it_is_the_same_and_old_configs_have_a_table(tmp_path):
    model = made(ShapedForCausalLM, positions="rope", rope_base=500.0)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.rope_base == 500.0
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    about = json.loads((tmp_path / "config.json").read_text())
    del about["positions"], about["rope_base"]
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert ShapedConfig.from_pretrained(tmp_path).positions == "learned"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rope_base": 500.0}, ("rope_base", "10000", "learned", "500")),
        ({"positions": "rope", "rope_base": 0.0}, ("rope_base", "0")),
        ({"positions": "none"}, ("positions", "learned, rope", "none")),
        ({"positions": "rope", "hidden_size": 12}, ("heads", "even", "3")),
    ],
)
def test_what_would_be_ignored_or_cannot_be_is_refused(given, words):
    with refused(*words):
        config(**given)
