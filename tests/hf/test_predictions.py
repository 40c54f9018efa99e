"""shaped.hf.predict: against models that transformers initialises, its tokens, its result, and what it refuses."""

import json
from pathlib import Path
from typing import Any, cast

import families
import numpy as np
import pytest
import torch
from scipy import stats as distributions
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    LlamaModel,
    MixtralConfig,
    Qwen2Config,
    RobertaConfig,
    ViTConfig,
)

from refusals import refused
from shaped.covariance import equicorrelated
from shaped.hf import Prediction, ShapedConfig, predict
from shaped.hf.prediction.embeddings import PatchEmbedding, TextEmbedding
from shaped.hf.prediction.encoders import truncated_std
from shaped.hf.prediction.families import FAMILIES, describe_network
from shaped.hf.prediction.parts import read_rope
from shaped.hf.prediction.sizes import read_sizes
from shaped.randomness import Stream
from shaped.testing.stats import Z, assert_mean, assert_rejected, seed

TINY: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 20}
SMALL: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "vocab_size": 20, "bos_token_id": None, "eos_token_id": None}
SEES_ALL: dict[str, Any] = {"is_causal": False}
MODELS = 16
MEASURED = ("gpt2", "qwen3", "gemma2", "shaped_stock_mistral")


def test_models_of_this_package_that_drop_their_shaping_are_refused():
    """The prediction would be that of the shaped model."""
    own: dict[str, Any] = {name: value for name, value in TINY.items() if name != "intermediate_size"} | {"attn_implementation": "sdpa"}
    with refused("attn_implementation must be 'shaped'", "'sdpa'"):
        predict(ShapedConfig(**own), tokens=4, samples=2, seed=0)
    predict(ShapedConfig(**own, block="preln"), tokens=4, samples=2, seed=0)  # nothing to drop


@pytest.fixture(scope="module")
def truths() -> dict[str, dict[str, torch.Tensor]]:
    """Of some families, each measured once."""
    ids = families.make_ids(8)
    return {name: families.measure_models(families.FAMILIES[name](64, 3), ids, MODELS, seed(5)) for name in MEASURED}


HOW: dict[str, Any] = {"tokens": families.make_ids(8), "samples": 64, "progress": False}


@pytest.mark.parametrize("name", MEASURED)
def test_models_of_transformers_lie_in_the_prediction(truths, name):
    """The other families, and larger models: tests/hf/families.py."""
    scores = families.score(truths[name], predict(families.FAMILIES[name](64, 3), **HOW, seed=seed(6)))
    assert families.find_worst(scores) < families.find_limit(scores, MODELS)


@pytest.mark.parametrize("name", MEASURED)
def test_a_wrong_ingredient_is_rejected(truths, name):
    wrong = families.predict_wrong(name, families.FAMILIES[name](64, 3), **HOW, seed=seed(7))
    assert wrong
    for prediction in wrong.values():
        scores = families.score(truths[name], prediction)
        assert families.find_worst(scores) > families.find_limit(scores, MODELS)


def test_every_family_has_a_config_to_check():
    made = {name: make(16, 2) for name, make in families.FAMILIES.items()}
    assert {config.model_type for config in made.values()} == set(FAMILIES)
    for config in made.values():
        assert len(describe_network(config, 8).blocks) == 2


def test_tokens_share_what_they_have_in_common():
    """Covariance of an entry: of the token's row if the ids agree, of the position, of the type. Padding has no row."""
    table = TextEmbedding(2.0, 10, padding=1, positions=3.0, most=4, types=0.5)
    V = table.covariance(torch.tensor([5, 1, 5, 1]))
    assert V.tolist() == [[13.25, 0.25, 4.25, 0.25], [0.25, 9.25, 0.25, 0.25], [4.25, 0.25, 13.25, 0.25], [0.25, 0.25, 0.25, 9.25]]
    kept = TextEmbedding(2.0, 10, padding=1, positions=3.0, most=4, types=0.5, keeps_padding=True)
    assert kept.covariance(torch.tensor([5, 1, 5, 1]))[1, 1] == 0.25


def test_a_given_covariance_is_where_tokens_start():
    V = equicorrelated(4, 0.3, variance=4.0)
    for config in (LlamaConfig(**TINY), GPT2Config(**SMALL, n_head=2)):  # by covariances, by tokens
        prediction = predict(config, V, samples=3, dtype=torch.float64)
        torch.testing.assert_close(prediction.rho[0], torch.full((3,), 0.3, dtype=torch.float64))
        torch.testing.assert_close(prediction.length[0], torch.full((3,), 2.0, dtype=torch.float64))
        assert prediction.info["tokens_given_as"] == "covariance"


def test_ids_and_a_number_of_distinct_tokens_are_the_same():
    config = LlamaConfig(**TINY, pad_token_id=1)
    one, other = predict(config, 4, samples=3), predict(config, [0, 2, 3, 4], samples=3)
    assert torch.equal(one.rho, other.rho)
    assert torch.equal(one.rho, predict(config, np.int64(4), samples=3).rho)
    assert not torch.equal(one.rho, predict(config, np.array([0, 2, 3, 2]), samples=3).rho)


def test_padding_counts_from_the_end_as_in_torch():
    config = LlamaConfig(**TINY, pad_token_id=-1)
    assert LlamaModel(config).embed_tokens.weight[19].eq(0).all()
    assert torch.equal(predict(config, [3, 19], samples=2).rho[0], torch.zeros(2, dtype=torch.float64))


def test_more_tokens_than_features():
    """Lengths are those of as many tokens as features; a covariance without a factor would change them by orders of magnitude.

    The means that attention adds are over more tokens, and so shorter: by 0.7 % of the length in each layer, as 256 samples say.
    """
    config = LlamaConfig(**cast(Any, TINY | {"vocab_size": 64}))
    few = predict(config, 16, samples=128, seed=seed(8)).length.T
    many = predict(config, 64, samples=32, seed=seed(9)).length.T
    error = (few.var(0) / 128 + many.var(0) / 32).sqrt()
    bias = 0.008 * few.mean(0) * torch.arange(3)

    def check_mean(found: torch.Tensor) -> None:
        assert ((found - few.mean(0)).abs() < Z * error + bias).all()

    check_mean(many.mean(0))
    assert_rejected(lambda: check_mean(0.95 * many.mean(0)))


def test_threads_do_not_change_a_bit():
    config = BertConfig(**TINY)
    one, other = (predict(config, 4, samples=20, seed=3, threads=threads) for threads in (1, 3))
    for name in families.QUANTITIES:
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert one.rho.shape == (3, 20)
    assert one.entropy.shape == (2, 20)
    assert not torch.equal(one.rho, predict(config, 4, samples=20, seed=4).rho)


@pytest.mark.parametrize("name", ["roberta", "llama", "modernbert", "vit", "shaped_preln"])
def test_a_default_device_changes_no_number(name, tmp_path):
    """As after torch.set_default_device("cuda"): parts of the network were made there, and the prediction failed."""
    config = families.FAMILIES[name](32, 2)
    tokens: Any = 8 if name == "vit" else families.make_ids(8)
    expected = predict(config, tokens, samples=2, seed=3)
    with torch.device("meta"):
        found = predict(config, tokens, samples=2, seed=3)
        assert found.gradients.t.is_cpu
        found.save(tmp_path / "found.npz")
        loaded = Prediction.load(tmp_path / "found.npz")
    for one in (found, loaded):
        assert all(torch.equal(getattr(one, quantity), getattr(expected, quantity)) for quantity in families.QUANTITIES)
        assert torch.equal(one.gradients.t, expected.gradients.t)
        assert torch.equal(one.gradients.loss, expected.gradients.loss)
        assert all(torch.equal(one.gradients.weights[matrix], values) for matrix, values in expected.gradients.weights.items())


def test_a_default_device_changes_no_size():
    config = LlamaConfig(**TINY)
    expected = read_sizes(config, 8)
    with torch.device("meta"):
        assert read_sizes(config, 8) == expected


def test_a_prediction_is_saved_and_loaded(tmp_path):
    found = predict(LlamaConfig(**TINY), 4, samples=3)
    found.save(tmp_path / "found.npz")
    again = Prediction.load(tmp_path / "found.npz")
    assert again.info == found.info
    for name in families.QUANTITIES:
        assert torch.equal(getattr(again, name), getattr(found, name))
        mean, error = again.mean(name)
        assert torch.equal(mean, getattr(found, name).mean(1))
        torch.testing.assert_close(error, getattr(found, name).std(1) / 3**0.5)
    with refused("quantity must be one of rho", "'x'"):
        found.mean("x")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "found.npz").read_bytes()[:-200])
    np.savez(tmp_path / "other.npz", rho=np.zeros(3))
    for name in ("cut.npz", "other.npz", "missing.npz"):
        with refused("path must be a file that Prediction.save wrote", name):
            Prediction.load(tmp_path / name)


ROPES = [
    {"rope_type": "default", "rope_theta": 300.0},
    {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0},
    families.LLAMA3 | {"rope_theta": 300.0},
    {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 16},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_frequencies_are_those_of_transformers(rope):
    config = LlamaConfig(**TINY, max_position_embeddings=64, rope_parameters=dict(rope))
    module = LlamaModel(config).rotary_emb
    frequencies, factor = read_rope(config, 8)
    torch.testing.assert_close(torch.tensor(frequencies), module.inv_freq, atol=0.0, rtol=1e-6)
    assert factor == pytest.approx(module.attention_scaling**2)


def test_fused_attention_of_transformers_has_no_soft_cap():
    """If transformers mends this, the model without it and the prediction differ from the others."""

    def make(cap: float | None, attention: str) -> tuple[torch.Tensor, Prediction]:
        config = Gemma2Config(**TINY, num_key_value_heads=1, head_dim=8, initializer_range=0.5, attn_logit_softcapping=cap)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            model = AutoModel.from_config(config, attn_implementation=attention).eval()
            return model(torch.arange(2, 8)[None]).last_hidden_state, predict(model.config, 6, samples=8, seed=3)

    capped, without, fused = make(0.5, "eager"), make(None, "eager"), make(0.5, "sdpa")
    torch.testing.assert_close(fused[0], without[0])
    assert (fused[0] - capped[0]).abs().max() > 0.1
    assert torch.equal(fused[1].entropy, without[1].entropy)
    assert not torch.equal(fused[1].entropy, capped[1].entropy)


def test_tables_of_vit_are_truncated():
    """At ±2, whatever their standard deviation is; the weights of the patches are not."""
    sizes = {key: value for key, value in TINY.items() if key != "vocab_size"}
    config = ViTConfig(**sizes, image_size=60, patch_size=1, num_channels=3, initializer_range=1.5)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed(10))
        X = AutoModel.from_config(config).embeddings(torch.zeros(1, 3, 60, 60))[0]  # tables alone: the first is two of them
    found = X.square().mean(1) / torch.tensor([2.0] + 3600 * [1.0])
    embedding = cast(PatchEmbedding, describe_network(config, 5).embedding)
    assert_mean(found, embedding.places**2)
    assert_rejected(lambda: assert_mean(found, 1.05 * embedding.places**2))
    V = embedding.choose_start(5).draw_factor(torch.empty(20_000, 1, 1), Stream(3, 0, dtype=torch.float32, device=torch.device("cpu")))
    variances = V.square().sum(-1)
    assert_mean(variances[:, 1:], embedding.places**2 + 3 * 1.5**2)
    assert torch.allclose(variances[:, 0], torch.tensor(2 * embedding.places**2))


def test_the_deviation_of_a_truncated_normal():
    for cutoff in (1.0, 2.0, 3.0):
        assert truncated_std(cutoff) == pytest.approx(distributions.truncnorm(-cutoff, cutoff).std(), rel=1e-9)
    assert truncated_std(1e90) == 1.0
    assert truncated_std(1e-3) == pytest.approx(1e-3 * truncated_std(1e-9) / 1e-9, rel=1e-6)
    assert truncated_std(None) == truncated_std(3.0)


def test_configs_are_read_from_files_and_folders(tmp_path, monkeypatch):
    config = ShapedConfig(**TINY, max_position_embeddings=8)
    config.save_pretrained(tmp_path / "model")
    by_object = predict(config, 4, samples=2)
    monkeypatch.chdir(tmp_path / "model")
    for place in (tmp_path / "model", str(tmp_path / "model" / "config.json"), "."):
        found = predict(place, 4, samples=2)
        assert torch.equal(found.rho, by_object.rho)
        assert found.info["name"] == "model"
    assert by_object.info["name"] == "shaped"


def test_example_configs_are_what_they_say():
    places = sorted((Path(__file__).parents[2] / "examples" / "configs").glob("*.json"))
    assert len(places) >= 7
    for place in places:
        entries = json.loads(place.read_text())
        config = AutoConfig.for_model(**entries)
        assert describe_network(config, 4).width == config.hidden_size
    entries = json.loads((places[0].parent / "llama-3.1-405b.json").read_text())
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    assert [entries[key] for key in sizes] == [126, 16384, 128, 8, 53248]


GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["must be JSON"]),
        ("[]", ["must be a JSON object"]),
        ("{}", ["must have model_type"]),
        (json.dumps(GPT2 | {"model_type": "mamba"}), ["model_type must be one of bert, ", "'mamba'"]),
        (json.dumps({"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2}), ["must have num_hidden_layers"]),
        (json.dumps({"model_type": "gpt2", "n_layer": 2, "n_head": 2}), ["must have hidden_size"]),
        (json.dumps(GPT2 | {"n_embd": "many"}), ["must be a config of gpt2", "n_embd"]),
        (json.dumps(GPT2 | {"n_embd": 0}), ["hidden_size must be at least 1", "0"]),
    ],
)
def test_bad_files_are_refused_by_the_field(tmp_path, text, words):
    (tmp_path / "config.json").write_text(text)
    with refused(*words):
        predict(tmp_path, 4, samples=2)


DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MixtralConfig(**TINY), ["model_type must be one of", "'mixtral'"]),
        (LlamaConfig(**TINY, hidden_act="quick_gelu"), ["hidden_act must be one of relu", "'quick_gelu'"]),
        (LlamaConfig(**TINY, num_key_value_heads=3), ["num_key_value_heads must divide", "3"]),
        (LlamaConfig(**TINY, initializer_range=0.0), ["initializer_range must be positive", "0"]),
        (LlamaConfig(**TINY, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), ["rope_type", "'dynamic'"]),
        (LlamaConfig(**TINY, rope_parameters=DEFAULT_ROPE | {"partial_rotary_factor": None}), ["partial_rotary_factor must be", "None"]),
        (
            Qwen2Config(**TINY, num_key_value_heads=1, layer_types=["full_attention", "chunked_attention"]),
            ["layer_types", "'chunked_attention'", "layer 1"],
        ),
        (
            GPT2Config(**SMALL, n_head=2, add_cross_attention=True),
            ["add_cross_attention must not be set"],
        ),
        (GPT2Config(**SMALL, n_head=3), ["num_attention_heads must divide hidden_size, 16", "3"]),
        (Gemma2Config(**TINY, use_bidirectional_attention=True), ["use_bidirectional_attention must not be set"]),
        (RobertaConfig(**TINY, max_position_embeddings=5), ["tokens must be at most 3", "4"]),
        (ViTConfig(hidden_size=16, num_attention_heads=2, image_size=4, patch_size=8), ["patch_size must be at most image_size", "8"]),
        (LlamaConfig(**TINY, **SEES_ALL), ["is_causal must be left out or true", "False"]),
        (BertConfig(**TINY, is_decoder=True, **SEES_ALL), ["is_causal must be left out or true", "False"]),
        (LlamaConfig(**TINY, head_dim=7), ["head_dim must be even", "7"]),
        (LlamaConfig(**TINY, pad_token_id=20), ["pad_token_id must be at most 19", "20"]),
        ("missing/config.json", ["config must be a folder", "missing/config.json"]),
        (3, ["config must be a transformers config", "int"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_not_in_the_prediction_is_refused(config, words):
    with refused(*words):
        predict(config, 4, samples=2)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (1, ["tokens must be at least 2", "1"]),
        (30, ["tokens must be at most the config's vocab_size, 20", "30"]),
        ([0, 20], ["tokens must be ids from 0 to 19", "20"]),
        ([0, -1], ["tokens must be ids from 0 to 19", "-1"]),
        ([0.5, 1.5], ["tokens must be a number, ids [m] or a covariance", "[2]"]),
        ([[1.0, 2.0], [2.0, 1.0]], ["tokens must be positive semi-definite"]),
        ([1, 1], ["tokens must not all be padding", "2 times 1"]),
        (torch.zeros(2, 2), ["tokens must be a covariance of tokens that are not all 0"]),
        (1e300 * torch.eye(2, dtype=torch.float64), ["dtype must hold", "torch.float32", "not finite"]),
        (equicorrelated(17, 0.1), ["tokens must be a covariance of at most 16 tokens", "17"]),
    ],
    ids=str,
)
def test_bad_tokens_are_refused(tokens, words):
    with refused(*words):
        predict(LlamaConfig(**TINY, pad_token_id=1), tokens, samples=2)


def test_other_bad_arguments_are_refused():
    config = LlamaConfig(**TINY)
    for name, value in (("samples", 0), ("seed", -1), ("threads", 0), ("dtype", torch.float16), ("device", "nowhere")):
        with refused(f"{name} must"):
            predict(config, 4, **cast(Any, {name: value}))
    with refused("tokens must be a number or a covariance for a vision model"):
        predict(ViTConfig(hidden_size=16, num_attention_heads=2), [1, 2])
