"""The arms as Hugging Face models: saved and loaded, generating from a cache, initialised as their config says."""

import math
from typing import Any

import pytest
import torch
from test_models import DEPTH, HEADS, N, config, made, tokens
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, GenerationConfig

from refusals import refused
from shaped.hf import ShapedForCausalLM, ShapedForMaskedLM, ShapedModel, vanilla
from shaped.hf.observation import QuantityRecorder
from shaped.nn import DyT, NormBlock, Recover, RMSNorm
from shaped.nn.diagnostics import attention_entropy
from shaped.testing.stats import seed

ARMS: dict[str, dict[str, Any]] = {
    "recover-qk": {"schedule": "recover", "qk_norm": True, "tau0": 0.3},
    "learn-qk-gain": {"schedule": "learn", "qk_norm": True, "qk_gain": True},
    "preln-rms-qk": {"block": "preln", "norm": "rms", "qk_norm": True, "init": "gpt2"},
    "postln-rms": {"block": "postln", "norm": "rms", "embedding_norm": True, "init": "bert"},
    "vanilla-qk": {"block": "vanilla", "qk_norm": True, "qk_gain": True, "tau0": 0.3},
    "dyt": {"block": "dyt", "dyt_alpha": 0.7, "embedding_norm": True},
}
arms = pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS.keys())


@arms
@pytest.mark.parametrize(("kind", "auto"), [(ShapedForMaskedLM, AutoModelForMaskedLM), (ShapedForCausalLM, AutoModelForCausalLM)])
def test_an_arm_is_saved_and_loaded(kind, auto, arm, tmp_path):
    model = made(kind, **arm)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path)
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    assert {name: getattr(again.config, name) for name in arm} == arm
    assert all((layer.block.attention.qk_gains is not None) == arm.get("qk_gain", False) for layer in again.model.layers)


@pytest.mark.parametrize(
    ("saved", "changes"),
    [
        ({"qk_norm": True}, {"qk_gain": True}),
        ({"block": "vanilla"}, {"block": "dyt"}),
        ({"block": "vanilla"}, {"block": "preln", "norm": "rms"}),
    ],
)
def test_gains_and_norms_that_a_checkpoint_lacks_start_as_they_should(saved, changes, tmp_path):
    made(ShapedModel, **saved).save_pretrained(tmp_path)
    model, new = ShapedModel.from_pretrained(tmp_path, **changes), made(ShapedModel, **saved | changes)
    added = [name for name, parameter in new.named_parameters() if parameter.ndim == 1 and ("norm" in name or "qk_gains" in name)]
    assert len(added) in (2 * DEPTH, 2 * DEPTH + 1, 3 * (2 * DEPTH + 1))
    assert all(torch.equal(model.get_parameter(name), new.get_parameter(name)) for name in added)


def test_blocks_with_norms_have_the_usual_temperature_whatever_tau0_is():
    for block in ("preln", "postln", "dyt"):
        attention = made(ShapedModel, block=block, qk_norm=True, tau0=0.3).layers[0].block.attention
        assert attention.scale == (N // HEADS) ** -0.5


@pytest.mark.parametrize("block", ["shaped", "vanilla"])
def test_qk_norm_has_the_usual_temperature_by_default(block, tmp_path):
    """Normalised queries and keys have logits of at most n_k·scale: with tau0 = 1 attention could not select a token."""
    model = made(ShapedModel, block=block, qk_norm=True)
    assert model.layers[0].block.attention.scale == pytest.approx((N // HEADS) ** -0.5)
    assert made(ShapedModel, block=block).config.tau0 == 1.0
    made(ShapedModel, block=block, qk_norm=True, tau0=1.0).save_pretrained(tmp_path)
    kept: Any = ShapedModel.from_pretrained(tmp_path)
    assert kept.layers[0].block.attention.scale == pytest.approx((N * N // HEADS) ** -0.5)


@pytest.mark.parametrize("arm", ["learn-qk-gain", "preln-rms-qk"])
def test_generation_with_qk_norm_does_not_depend_on_the_cache(arm):
    """The cache holds keys that are normalised already."""
    model = made(ShapedForCausalLM, **ARMS[arm]).double()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.block.attention.key.weight.mul_(3.0)
    settings = GenerationConfig(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    mask = torch.ones_like(tokens())
    without, cached = (model.generate(tokens(), attention_mask=mask, generation_config=settings, use_cache=use) for use in (False, True))
    assert without.shape == (2, 15)
    assert torch.equal(cached, without)
    cache = model(tokens(), use_cache=True).past_key_values
    assert cache.layers[0].keys.square().mean(-1).sub(1.0).abs().max() < 1e-4


def test_entropies_are_those_of_normalised_queries_and_keys():
    model = made(ShapedModel, qk_norm=True, tau0=0.05)
    attention, x = model.layers[0].block.attention, model.embedding(model.embedding.tokens(tokens()), torch.arange(9)[None], None)
    q, k = (layer(x).unflatten(-1, (attention.heads, -1)).transpose(1, 2) for layer in (attention.query, attention.key))
    q, k = (y / y.square().mean(-1, keepdim=True).sqrt() for y in (q, k))
    with torch.no_grad(), QuantityRecorder(model) as seen:
        model(tokens())
    expected = attention_entropy(q, k, scale=attention.scale).mean().item()
    assert seen.values["layers.0"]["entropy"] == pytest.approx(expected, rel=1e-5)
    assert expected < math.log(9) - 0.05


def test_recover_with_qk_norm_ends_at_a_vanilla_model(tmp_path):
    """Its temperature stays in the scale of the logits, also after a restart."""
    model = made(ShapedForMaskedLM, **ARMS["recover-qk"])
    Recover(10).apply(model, 10)
    plain = vanilla(model)
    assert torch.equal(plain(tokens()).logits, model(tokens()).logits)
    plain.save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert again.config.block == "vanilla"
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def test_norms_are_of_the_kind_that_the_config_says():
    for arm, kind, count in (("preln-rms-qk", RMSNorm, 2 * DEPTH + 1), ("postln-rms", RMSNorm, 2 * DEPTH + 1), ("dyt", DyT, 2 * DEPTH + 2)):
        model = made(ShapedModel, **ARMS[arm])
        assert all(isinstance(layer.block, NormBlock) for layer in model.layers)
        assert sum(isinstance(module, kind) for module in model.modules()) == count
        assert not any(isinstance(module, torch.nn.LayerNorm) for module in model.modules())
    assert all(module.alpha.item() == pytest.approx(0.7) for module in model.modules() if isinstance(module, DyT))
    assert isinstance(made(ShapedModel, norm="rms", embedding_norm=True).embedding.norm, RMSNorm)


@pytest.mark.parametrize("init", ["theory", "bert", "gpt2"])
def test_matrices_start_as_the_config_says(init):
    """Tables and output matrix too, unless they are given a standard deviation of their own."""
    torch.manual_seed(seed(7))
    model = made(ShapedForMaskedLM, block="preln", init=init, vocab_size=400)
    usual, outputs = {"theory": (N**-0.5, N**-0.5), "bert": (0.02, 0.02), "gpt2": (0.02, 0.02 / math.sqrt(2 * DEPTH))}[init]
    block = model.model.layers[1].block
    expected = [(block.attention.value, usual), (block.feedforward.pre, usual), (block.attention.output, outputs), (model.head, usual)]
    if init != "theory":
        expected += [(block.feedforward.post, outputs), (model.model.embedding.tokens, 0.02), (model.model.embedding.positions, 0.02)]
    for matrix, std in expected:
        assert matrix.weight.square().mean().item() == pytest.approx(std**2, rel=5 * math.sqrt(2 / matrix.weight.numel()))
    given = made(ShapedForMaskedLM, block="preln", init=init, embedding_std=0.3, head_std=0.1, vocab_size=400)
    assert given.model.embedding.tokens.weight.std().item() == pytest.approx(0.3, rel=0.05)
    assert given.head.weight.std().item() == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"norm": "rms"}, ["norm", "layer", "shaped", "rms"]),
        ({"block": "vanilla", "norm": "rms"}, ["norm", "layer", "vanilla", "rms"]),
        ({"block": "dyt", "norm": "rms", "embedding_norm": True}, ["norm", "layer", "dyt", "rms"]),
        ({"block": "preln", "norm": "batch"}, ["norm", "layer, rms", "batch"]),
        ({"block": "preln", "dyt_alpha": 0.25}, ["dyt_alpha", "0.5", "preln", "0.25"]),
        ({"block": "dyt", "dyt_alpha": 0.0}, ["dyt_alpha", "0.0"]),
        ({"qk_gain": True}, ["qk_gain", "qk_norm", "True"]),
        ({"init": "bert"}, ["init", "theory", "shaped", "bert"]),
        ({"block": "preln", "init": "xavier"}, ["init", "theory, bert, gpt2", "xavier"]),
    ],
)
def test_what_a_block_would_ignore_is_refused(wrong, words):
    with refused(*words):
        config(**wrong)
