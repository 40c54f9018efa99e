"""Gradients that are written where they are read."""

from typing import Any

import pytest
import torch
from torch import nn

from shaped.hf import ShapedConfig, ShapedForMaskedLM
from shaped.testing.stats import generator
from shaped.train.step.direct_gradients import DirectEmbedding, install_direct_embeddings


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_of_a_table_is_that_of_an_embedding(compiled: bool):
    """With rows that are used twice and rows that are not used; what was there before is gone."""
    table = torch.randn(7, 4, generator=generator(160), dtype=torch.float64)
    ids, weight = torch.tensor([[0, 3, 3], [6, 0, 3]]), torch.randn(2, 3, 4, generator=generator(161), dtype=torch.float64)
    plain = nn.Embedding(7, 4, _weight=table.clone())
    (expected,) = torch.autograd.grad((weight * plain(ids)).sum(), plain.weight)
    other = nn.Parameter(torch.ones(4, dtype=torch.float64))
    rows = DirectEmbedding(table.clone(), torch.full((7, 4), 5.0, dtype=torch.float64), other)

    def loss() -> torch.Tensor:
        return (weight * (rows(ids) + other)).sum()

    (found,) = torch.autograd.grad((torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss)(), other)
    assert (rows.gradient - expected).abs().max() < 1e-14
    assert (found - weight.sum((0, 1))).abs().max() < 1e-14


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize(("tied", "device", "replaced"), [(False, "meta", True), (True, "meta", False), (False, "cpu", False)])
def test_a_table_with_another_use_is_left_to_autograd(
    tied: bool, device: str, replaced: bool, positions: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.is_meta))  # there need be no GPU
    sizes: dict[str, Any] = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = ShapedForMaskedLM(ShapedConfig(**sizes, max_position_embeddings=4, tie_word_embeddings=tied, positions=positions))
    given = {name: torch.empty_like(parameter, device=device) for name, parameter in model.named_parameters()}
    assert install_direct_embeddings(model, given, given) == ({"model.embedding.tokens.weight"} if replaced else set())
    assert isinstance(model.model.embedding.tokens, DirectEmbedding) is replaced


def test_a_table_that_is_all_there_is_to_differentiate_is_left_to_autograd(monkeypatch: pytest.MonkeyPatch):
    """Rotary positions have no table, gains may not be trained, and other layers may have their gradients written in place."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.is_meta))
    sizes: dict[str, Any] = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = ShapedForMaskedLM(ShapedConfig(**sizes, positions="rope", train_gains=False))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "model.embedding.tokens.weight")
    given = {name: torch.empty_like(parameter, device="meta") for name, parameter in model.named_parameters()}
    assert install_direct_embeddings(model, given, given) == set()
