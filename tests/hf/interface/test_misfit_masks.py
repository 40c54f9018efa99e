"""Masks that do not fit the tokens are refused: transformers would take what is missing for padding, or add ones to the logits."""

import pytest
import torch
from stock import TOKENS, VOCABULARY, bert, gpt2, llama, made, own
from test_interface import tokens
from transformers import StaticCache

from refusals import refused
from shaped.hf import ShapedConfig, ShapedForMaskedLM


@pytest.mark.parametrize("make", [gpt2, llama, own])
@pytest.mark.parametrize("columns", [5, 12])
def test_a_mask_has_a_column_for_each_token(make, columns):
    model, ids = made(make), tokens()
    with refused("attention_mask", "each of the 9 tokens", f"got {columns}"):
        model(ids, attention_mask=torch.ones(len(ids), columns, dtype=torch.long))


@pytest.mark.parametrize("make", [gpt2, llama, own])
def test_a_mask_covers_the_cache(make):
    """The mask of the new token alone is a frequent slip: all of the cache but its first token was masked."""
    model, ids = made(make), tokens()
    expected, ones = model(ids, use_cache=False).logits[:, -1], torch.ones_like(ids)
    with refused("attention_mask", "each of the 9 tokens, cached ones included", "got 1"):
        model(ids[:, -1:], attention_mask=ones[:, -1:], past_key_values=model(ids[:, :-1], use_cache=True).past_key_values)
    found = model(ids[:, -1:], attention_mask=ones, past_key_values=model(ids[:, :-1], use_cache=True).past_key_values)
    assert (found.logits[:, -1] - expected).abs().max() < 1e-10


@pytest.mark.parametrize("make", [gpt2, own])
def test_a_static_cache_is_longer_than_its_mask(make):
    model, ids = made(make), tokens()
    cache = StaticCache(config=model.config, max_cache_len=16)
    for part in (slice(0, 8), slice(8, 9)):
        found = model(ids[:, part], attention_mask=torch.ones_like(ids[:, : part.stop]), past_key_values=cache).logits
    assert (found[:, -1] - model(ids, use_cache=False).logits[:, -1]).abs().max() < 1e-10
    whole = (torch.arange(16) < 9).long().expand(len(ids), -1)  # as long as the cache, so that a compiled step has one shape
    found = model(ids, attention_mask=whole, past_key_values=StaticCache(config=model.config, max_cache_len=16)).logits
    assert (found - model(ids, use_cache=False).logits).abs().max() < 1e-10


@pytest.mark.parametrize("make", [bert, gpt2, own])
def test_ones_and_zeros_are_no_bias(make):
    """A row for each query: a boolean mask, or a bias. Whole numbers were added to the logits."""
    model, ids = made(make), tokens()
    seen = torch.ones(9, 9, dtype=torch.long).tril().expand(len(ids), 1, 9, 9)
    with refused("attention_mask", "boolean", "int64"):
        model(ids, attention_mask=seen)
    bias = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(seen == 0, torch.finfo(torch.float64).min)
    assert (model(ids, attention_mask=bias).logits - model(ids, attention_mask=seen.bool()).logits).abs().max() < 1e-10


def test_the_shape_of_a_mask_is_told_by_its_name():
    config = ShapedConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, **TOKENS)
    for implementation in ("shaped", "eager"):
        model = ShapedForMaskedLM._from_config(config, attn_implementation=implementation)
        for shape in ((9,), (2, 1, 9)):
            with refused("attention_mask must be [batch, tokens]", str(shape)):
                model(tokens(), attention_mask=torch.ones(shape))
        with refused("attention_mask", "9 tokens", "got 4"):
            model(tokens(), attention_mask=torch.ones(2, 4))
