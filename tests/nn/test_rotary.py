"""Rotary positions: relative, and those of transformers' Llama."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from refusals import refused
from shaped.nn.rotary import make_rotation, rotate

BATCH, HEADS, M, E = 2, 3, 5, 8


def draw(number: int) -> torch.Tensor:
    return torch.randn(BATCH, HEADS, M, E, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


@pytest.mark.parametrize("base", [10_000.0, 500.0])
def test_it_is_that_of_llama(base: float):
    """The same layout: the same numbers on the same queries and keys, at positions that differ between the sequences of a batch."""
    q, k = draw(0).float(), draw(1).float()
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 0, 1]])
    config = LlamaConfig(
        hidden_size=HEADS * E, num_attention_heads=HEADS, head_dim=E, rope_parameters={"rope_type": "default", "rope_theta": base}
    )
    expected = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(q, positions))
    rotation = make_rotation(positions, E, base)
    for x, other in zip((q, k), expected, strict=True):
        assert (rotate(x, rotation) - other).abs().max() < 1e-6


def test_logits_depend_on_differences_of_positions():
    q, k = draw(0), draw(1)
    positions = torch.tensor([[3, 0, 4, 9, 2]])
    logits = [rotate(q, turned) @ rotate(k, turned).mT for turned in (make_rotation(positions + shift, E) for shift in (0, 11))]
    assert (logits[0] - logits[1]).abs().max() < 1e-5  # angles are float32
    assert (logits[0] - q @ k.mT).abs().max() > 0.1
    assert torch.equal(rotate(q, make_rotation(torch.zeros(1, M, dtype=torch.long), E)), q)


def test_lengths_stay_and_dtypes_too():
    q = draw(0)
    rotation = make_rotation(torch.arange(M)[None], E)
    assert (rotate(q, rotation).norm(dim=-1) - q.norm(dim=-1)).abs().max() < 1e-6
    assert rotate(q.bfloat16(), rotation).dtype == torch.bfloat16


def test_an_odd_number_of_features_is_refused():
    with refused("features", "even", "7"):
        make_rotation(torch.arange(3)[None], 7)
