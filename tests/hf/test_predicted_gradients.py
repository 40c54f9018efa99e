"""predict(…).gradients: against models that transformers initialises, and how they are drawn, saved and loaded."""

from typing import Any

import families
import family_gradients
import numpy as np
import pytest
import torch
from transformers import BertConfig, GPT2Config, LlamaConfig, PreTrainedConfig

from refusals import refused
from shaped.covariance import equicorrelated
from shaped.hf import Prediction, predict
from shaped.hf.prediction.families import describe_network
from shaped.randomness import Stream
from shaped.testing.stats import seed

MODELS, SAMPLES = 128, 512
IDS = families.make_ids(6)
TINY: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 20}
# Small branches: GPT-2's residual stream keeps its embedding, so that a tied head knows it.
GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_inner": 1, "vocab_size": 20, "n_positions": 8, "initializer_range": 0.1}
CONFIGS: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(**GPT2, bos_token_id=None, eos_token_id=None),
    "bert": BertConfig(**TINY, initializer_range=0.3, max_position_embeddings=8, pad_token_id=1),
}


@pytest.fixture(scope="module")
def truths() -> dict[str, dict[str, torch.Tensor]]:
    return {name: family_gradients.measure_gradients(config, IDS, MODELS, seed(31)) for name, config in CONFIGS.items()}


def find_worst(truth: dict[str, torch.Tensor], config: PreTrainedConfig, error: float = 0.0) -> tuple[float, float]:
    """The largest |z|, and what it may be. `error` is added to the logarithms."""
    found = family_gradients.take_logarithms(predict(config, IDS, samples=SAMPLES, seed=seed(32)).gradients)
    scores = family_gradients.score(truth, {name: values + error * (name != "loss") for name, values in found.items()})
    return families.find_worst(scores), family_gradients.find_limit(scores, MODELS)


@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_transformers_have_the_predicted_gradients(truths, name):
    """The other families, and larger models: tests/hf/family_gradients.py."""
    worst, limit = find_worst(truths[name], CONFIGS[name])
    assert worst < limit


def test_wrong_gradients_are_rejected(truths):
    """Of a matrix that is not tied, and wrong by a factor."""
    for config, error in ((family_gradients.untie(CONFIGS["gpt2"]), 0.0), (CONFIGS["gpt2"], 0.1)):
        worst, limit = find_worst(truths["gpt2"], config, error)
        assert worst > limit


def test_they_are_drawn_at_the_first_use_whatever_the_threads():
    config = LlamaConfig(**TINY, hidden_act="relu2")
    one, other = (predict(config, 4, samples=20, seed=3, threads=threads) for threads in (1, 3))
    assert "gradients" not in vars(one)
    assert one.gradients is one.gradients
    for name, values in one.gradients.weights.items():
        assert values.shape == (2, 20)
        assert torch.equal(values, other.gradients.weights[name])
    assert one.gradients.tokens.shape == (3, 20)
    assert one.gradients.entries == {"query": 256, "key": 256, "value": 256, "output": 256, "first": 384, "second": 384, "gate": 384}
    assert not torch.equal(one.gradients.loss, predict(config, 4, samples=20, seed=4).gradients.loss)


def test_tokens_may_be_a_covariance_or_have_padding():
    tied = LlamaConfig(**TINY, tie_word_embeddings=True, pad_token_id=1)
    for tokens in (equicorrelated(3, 0.5), [0, 1, 5]):
        found = predict(tied, tokens, samples=4).gradients
        assert found.V.shape == (4, 3, 3)
        assert found.loss.isfinite().all()


def test_a_tied_head_has_the_tokens_rows_and_no_row_of_padding():
    network = describe_network(LlamaConfig(**TINY, tie_word_embeddings=True, pad_token_id=1, initializer_range=0.5), 4)
    like, n = torch.empty(64, 1, 1, dtype=torch.float64), 16
    start = network.embedding.choose_start(torch.tensor([3, 1, 7, 3]))
    X, rows = start.draw_tokens_and_rows(like, n, Stream(seed(33), 0, dtype=torch.float64, device=torch.device("cpu")))
    assert rows.shape == (64, 3, n)
    torch.testing.assert_close(X[:, [0, 2, 3]], 0.5 * rows[:, [0, 1, 0]])
    assert not X[:, 1].any()
    assert not rows[:, 2].any()


def test_gradients_are_saved_and_loaded(tmp_path):
    found = predict(LlamaConfig(**TINY), 4, samples=3)
    found.save(tmp_path / "without.npz")
    with refused("gradients"):
        _ = Prediction.load(tmp_path / "without.npz").gradients
    drawn = found.gradients
    found.save(tmp_path / "with.npz")
    Prediction.load(tmp_path / "with.npz").save(tmp_path / "again.npz")
    loaded = Prediction.load(tmp_path / "again.npz").gradients
    assert repr(loaded) == repr(drawn)
    for name in ("t", "tokens", "loss", "V", "stopped"):
        assert torch.equal(getattr(loaded, name), getattr(drawn, name))
    for name, values in drawn.weights.items():
        assert torch.equal(loaded.weights[name], values)
        assert torch.equal(loaded.per_entry(name), drawn.per_entry(name))
    with np.load(tmp_path / "with.npz") as content:
        arrays: dict[str, Any] = {name: content[name] for name in content.files}
    for name, damaged in (
        ("gradients.weights.query", np.zeros((2, 2))),
        ("gradients.V", np.zeros((3, 4, 5))),
        ("gradients.about", np.zeros(0)),
    ):
        changed: dict[str, Any] = arrays | {name: damaged}
        np.savez(tmp_path / "damaged.npz", **changed)
        with pytest.raises(ValueError, match="must"):
            Prediction.load(tmp_path / "damaged.npz")
