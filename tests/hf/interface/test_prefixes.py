"""Models whose prompt is a prefix that sees itself whole, while what they generate is causal."""

from typing import Any

import pytest
import torch
from stock import TOKENS, VOCABULARY, made
from transformers import GemmaConfig, PaliGemmaConfig, PaliGemmaForConditionalGeneration, SiglipVisionConfig, StaticCache

from shaped.testing.stats import generator

IMAGE = 5
PATCHES = 4


def paligemma() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = GemmaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=4, **sizes, **TOKENS)
    no_head: dict[str, Any] = {"vision_use_head": False}
    vision = SiglipVisionConfig(image_size=8, patch_size=4, **sizes, **no_head)
    parts: dict[str, Any] = {"text_config": text.to_dict(), "vision_config": vision.to_dict(), "image_token_id": IMAGE}
    return PaliGemmaForConditionalGeneration, PaliGemmaConfig(**parts, projection_dim=16)


@pytest.mark.parametrize("cache", [{"use_cache": True}, {"cache_implementation": "static", "disable_compile": True}], ids=str)
@pytest.mark.parametrize("marked", [True, False])
def test_paligemma_generates_as_it_reads(cache, marked):
    """Each token that was generated with a cache is the likeliest after the prompt and the tokens before it, read at once."""
    model, prompt = made(paligemma), torch.randint(6, VOCABULARY, (1, 9), generator=generator(0))
    prompt[:, :PATCHES] = IMAGE
    given: dict[str, Any] = {"pixel_values": torch.randn(1, 3, 8, 8, generator=generator(1), dtype=torch.float64)}
    given |= {"token_type_ids": torch.zeros_like(prompt)} if marked else {}
    settings: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 1} | cache
    written = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **given, **settings)
    ahead = torch.nn.functional.pad(torch.zeros_like(prompt), (0, 4), value=1)  # a suffix is causal
    logits = model(input_ids=written[:, :-1], **(given | {"token_type_ids": ahead}), use_cache=False).logits
    assert torch.equal(logits[:, 8:].argmax(-1), written[:, 9:])


def test_a_prompt_in_a_static_cache_is_the_prompt():
    """Its mask is None, and the rest of the cache is empty."""
    model, prompt = made(paligemma), torch.randint(6, VOCABULARY, (1, 9), generator=generator(0))
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=14)
    assert (model(prompt, past_key_values=cache).logits - model(prompt, use_cache=False).logits).abs().max() < 1e-10
