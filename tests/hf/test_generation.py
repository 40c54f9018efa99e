"""The package's decoder generates the same text with every cache and from every kind of input."""

from typing import Any

import pytest
import torch
from test_models import DEPTH, HEADS, PADDING, N, made, tokens
from transformers import GenerationConfig

from shaped.hf import ShapedForCausalLM


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("config", [{"block": "shaped"}, {"block": "preln"}, {"positions": "rope", "qk_norm": True}], ids=str)
def test_generation_does_not_depend_on_the_cache(config, padded):
    model = made(ShapedForCausalLM, **config).double()
    mask = PADDING.flip(-1) if padded else torch.ones_like(PADDING)
    settings = GenerationConfig(max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    without, dynamic, static = (
        model.generate(tokens(), attention_mask=mask, generation_config=settings, **cache)
        for cache in (
            {"use_cache": False},
            {"use_cache": True},
            {"cache_implementation": "static", "disable_compile": True},
        )
    )
    assert without.shape == (2, 17)
    assert torch.equal(dynamic, without)
    assert torch.equal(static, without)
    beams = [
        model.generate(tokens(), attention_mask=mask, generation_config=settings, num_beams=3, **cache)
        for cache in ({"use_cache": False}, {"use_cache": True}, {"cache_implementation": "static", "disable_compile": True})
    ]
    assert torch.equal(beams[1], beams[0])
    assert torch.equal(beams[2], beams[0])


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "top_k": 5},
        {"num_beams": 2, "do_sample": True},
        {"prompt_lookup_num_tokens": 2},
        {"prefill_chunk_size": 4},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_ways_to_generate(settings):
    """Each gives what it gives without a cache, where it can do without one."""
    model = made(ShapedForCausalLM, bos_token_id=1, eos_token_id=None).double()
    given: dict[str, Any] = {
        "max_new_tokens": 6,
        "min_new_tokens": 6,
        "pad_token_id": 0,
        "attention_mask": torch.ones(1, 9, dtype=torch.long),
    }
    greedy = {"do_sample": False} | settings
    torch.manual_seed(5)
    found = model.generate(tokens(batch=1), **given, **greedy)
    plain = {name: value for name, value in greedy.items() if name not in ("prompt_lookup_num_tokens", "prefill_chunk_size")}
    torch.manual_seed(5)
    assert torch.equal(found, model.generate(tokens(batch=1), use_cache=False, **given, **plain))


def test_generation_with_an_assistant_and_from_a_past():
    model, assistant = made(ShapedForCausalLM).double(), made(ShapedForCausalLM, seed=1).double()
    ids, settings = tokens(batch=1), GenerationConfig(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, generation_config=settings)
    assert torch.equal(model.generate(ids, generation_config=settings, assistant_model=assistant), expected)
    past = model(ids[:, :5], use_cache=True).past_key_values
    assert torch.equal(model.generate(ids, generation_config=settings, past_key_values=past), expected)


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_generation_from_embeddings_and_with_padding_on_the_left(positions):
    model, ids = made(ShapedForCausalLM, positions=positions).double(), tokens()
    settings = GenerationConfig(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, generation_config=settings)
    embedded, mask = model.get_input_embeddings()(ids), torch.ones_like(ids)
    for cache in ({}, {"cache_implementation": "static", "disable_compile": True}):
        found = model.generate(inputs_embeds=embedded, attention_mask=mask, generation_config=settings, **cache)
        assert torch.equal(found, expected[:, 9:])
    padded, seen = (torch.nn.functional.pad(x, (4, 0)) for x in (ids, mask))
    assert torch.equal(model.generate(padded, attention_mask=seen, generation_config=settings)[:, 4:], expected)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}, {"use_cache": False}, {"do_sample": True}], ids=str)
def test_generation_tells_scores_states_and_matrices(settings):
    model, wanted = made(ShapedForCausalLM), ("scores", "logits", "hidden_states", "attentions")
    given: dict[str, Any] = {f"output_{name}": True for name in wanted} | {"return_dict_in_generate": True, "pad_token_id": 0}
    found = model.generate(tokens(), max_new_tokens=3, min_new_tokens=3, **({"do_sample": False} | given | settings))
    batch, queries = 2 * settings.get("num_beams", 1), 1 if settings.get("use_cache", True) else 11
    assert [len(found[name]) for name in wanted] == [3] * 4
    assert [tuple(A.shape) for A in found.attentions[-1]] == [(batch, HEADS, queries, 11)] * DEPTH
    assert [tuple(x.shape) for x in found.hidden_states[-1]] == [(batch, queries, N)] * (DEPTH + 1)
