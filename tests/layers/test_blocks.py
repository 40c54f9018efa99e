"""Blocks of Transformers in use: each law against explicit weights, and each of its formulas."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from explicit import ALIBI, BLOCKS, draw_explicit, draw_law
from torch import Tensor

import shaped
from shaped import Norm, ResidualBlock, Weights
from shaped.testing.stats import assert_rejected, assert_same_moments

NETWORKS = 8_000
MORE = {"attention, biases": 20_000}  # for blocks whose options have small effects
CPU = torch.device("cpu")


@cache
def explicit(name: str) -> Tensor:
    return draw_explicit(BLOCKS[name], MORE.get(name, NETWORKS), 51)


def path_of(layer: shaped.Layer) -> str:
    return "tokens" if layer.needs_tokens else "gram"


@pytest.mark.parametrize("name", BLOCKS)
def test_one_step_has_the_law_of_explicit_weights(name):
    """Covariance and entropy: means, covariances, third moments."""
    layer = BLOCKS[name]
    for path in {"tokens", path_of(layer)}:
        assert_same_moments(draw_law(layer, path, 2 * NETWORKS, 52), explicit(name))


def change(name: str, **options: Any) -> shaped.Layer:
    """The block with other options: of its branch where the branch has them, else its own."""
    layer = BLOCKS[name]
    assert isinstance(layer, ResidualBlock)
    assert isinstance(layer.branches, tuple)
    branch = layer.branches[0]
    inside: dict[str, Any] = {key: value for key, value in options.items() if hasattr(branch, key)}
    outside: dict[str, Any] = {key: value for key, value in options.items() if key not in inside}
    return replace(layer, branches=(replace(branch, **inside), *layer.branches[1:]), **outside)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("attention, biases", {"query": Weights(0.315, 1.2)}),
        ("attention, biases", {"query": Weights(0.3, 1.26)}),
        ("attention, biases", {"value": Weights(0.315, 1.2)}),
        ("attention, biases", {"value": Weights(0.3, 1.26)}),
        ("attention, biases", {"output": Weights(0.315, 1.4)}),
        ("attention, biases", {"output": Weights(0.3, 1.47)}),
        ("narrow heads", {"scale": 1.05 * 2**-0.5}),
        ("grouped, rotary", {"norm": Norm("rms", eps=1.0, gain=1.575)}),
        ("grouped, rotary", {"rope": None}),
        ("grouped, rotary", {"key_heads": 4}),
        ("grouped, rotary", {"key_heads": 1}),
        ("multi-query, rotary in part, biases", {"rope": None}),
        ("ALiBi, grouped", {"mask": ALIBI[[0, 0, 1, 1]]}),
        ("ALiBi, grouped", {"norm": Norm("rms", eps=1.05, gain=1.5)}),
        ("window, soft cap", {"window": 3}),
        ("window, soft cap", {"softcap": 1.05}),
        ("QK-norm of a head", {"qk_norm": Norm("rms", eps=5.25, gain=1.5)}),
        ("QK-norm of a head", {"qk_norm": Norm("rms", eps=5.0, gain=1.575)}),
        ("QK-norm of all heads", {"qk_norm_over": "head"}),
        ("shaped", {"gamma1": 0.945}),
        ("shaped", {"gamma2": 0.735}),
        ("SwiGLU, norm and post", {"norm": Norm("rms", eps=1.05, gain=1.5)}),
        ("SwiGLU, norm and post", {"post": Norm("rms", eps=3.15, gain=1.5)}),
        ("SwiGLU, norm and post", {"activation": "gelu"}),
        ("SwiGLU, norm and post", {"inner": Weights(0.315)}),
        ("SwiGLU, norm and post", {"hidden": 25}),
        ("Post-LN", {"after": Norm("layer", eps=1.05, gain=1.5)}),
        ("Post-LN", {"outer": Weights(0.315, 0.5)}),
        ("DyT", {"norm": Norm("dyt", gain=1.4, alpha=0.84)}),
        ("DyT", {"lam": 1.05}),
        ("parallel", {"gamma": 0.735}),
    ],
    ids=str,
)
def test_a_law_that_is_five_percent_off_is_rejected(name, options):
    wrong = change(name, **options)
    drawn = draw_law(wrong, path_of(wrong), 3 * MORE.get(name, NETWORKS), 53)
    assert_rejected(lambda: assert_same_moments(drawn, explicit(name)))
