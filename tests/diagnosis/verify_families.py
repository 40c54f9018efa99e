"""Every quantity of `observe` against the same one by hand, for twelve families of transformers, at a real size.

    PYTHONPATH=tests:tests/hf python tests/diagnosis/verify_families.py [--width 512] [--depth 24] [--tokens 48]

A family takes some seconds. The tests do the same with small models.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import pytest
import torch
from by_hand import check_attention, check_gradients, check_tokens
from families import FAMILIES, watch_stream  # pyright: ignore[reportMissingImports] (in tests/hf)
from torch import Tensor
from transformers import AutoModel

from shaped.diagnosis import Observation, observe
from shaped.diagnosis.one_pass.losses import project
from shaped.testing.stats import generator

STOCK = ("gpt2", "bert", "roberta", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt_neox", "vit", "modernbert", "olmo2")


def observe_eagerly(model: Any, inputs: dict[str, Tensor]) -> tuple[Any, list[Tensor], list[Tensor]]:
    """The output, the inputs of each softmax over 4 dimensions, and the stream, of a model that materialises its attention."""
    logits: list[Tensor] = []
    plain = torch.nn.functional.softmax

    def softmax(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.ndim == 4:
            logits.append(x.detach())
        return plain(x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, watch_stream(model, model.config.num_hidden_layers) as stream:
        patch.setattr(torch.nn.functional, "softmax", softmax)
        output = model(**inputs)
    return output, logits, stream


def compare_family(name: str, width: int, depth: int, tokens: int) -> Observation:
    """Two sequences, one with padding, in double precision; fused and eager. An AssertionError names what differs by more than 1e-5."""
    config = FAMILIES[name](width, depth)
    torch.manual_seed(3)
    model: Any = AutoModel.from_config(config, attn_implementation="eager" if name == "gemma2" else "sdpa").double().eval()
    if name == "vit":
        inputs, real = {"pixel_values": torch.randn(2, config.num_channels, *config.image_size, generator=generator(1)).double()}, None
    else:
        mask = torch.ones(2, tokens, dtype=torch.int64)
        mask[1, -2:] = 0  # more would fill a sliding window: eager attention then gives nan, also to real tokens
        inputs, real = {"input_ids": torch.randint(3, 60, (2, tokens), generator=generator(1)), "attention_mask": mask}, mask != 0
    seen = observe(model, inputs)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    output, logits, stream = observe_eagerly(eager, inputs)
    project(output.last_hidden_state).backward()
    (stack,) = seen.stacks
    assert len(stack.layers) == len(logits) == depth
    for found, x in zip((stack.entering, *(layer.tokens for layer in stack.layers)), stream, strict=True):
        check_tokens(found, x, real)
    for layer, values in zip(stack.layers, logits, strict=True):
        (call,) = layer.attention.values()
        check_attention(call, values, real)
        assert layer.dead <= 0.01  # where all tokens are alike, a GELU far on the left is dead
    check_gradients(stack.layers, eager)
    for layer, values in zip(observe(eager, inputs).stacks[0].layers, logits, strict=True):
        (call,) = layer.attention.values()
        check_attention(call, values, real)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 512), ("depth", 24), ("tokens", 48)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    for name in STOCK:
        began = time.process_time()
        last = compare_family(name, given.width, given.depth, given.tokens).stacks[0].layers[-1].tokens
        spent = time.process_time() - began
        print(f"{name}: right; last layer: correlation {last.correlation:.3f}, rank {last.rank:.2f}; {spent:.0f} s of the CPU", flush=True)


if __name__ == "__main__":
    main()
