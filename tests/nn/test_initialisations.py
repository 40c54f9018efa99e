"""reset_parameters: what it refuses, because weights would stay as they are."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

from refusals import refused
from shaped.nn import ShapedSelfAttention, reset_parameters


class Adapted(nn.Linear):
    """PyTorch's `reset_parameters` does not know what was added."""

    def __init__(self, features: int, outputs: int):
        super().__init__(features, outputs)
        self.low_rank = nn.Parameter(torch.ones(features, 1))


def prune_query(attention: ShapedSelfAttention) -> nn.Module:
    prune.random_unstructured(attention.query, "weight", amount=0.5)
    return attention


def make_old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return weight_norm(nn.Linear(3, 4))


def make_old_spectral_norm() -> nn.Module:
    made = spectral_norm(nn.Linear(3, 4))
    made(torch.ones(1, 3))  # before it the computed weight is the other one
    return made


@pytest.mark.parametrize(
    ("make", "left"),
    [
        (make_old_weight_norm, "weight_g"),
        (make_old_spectral_norm, "weight_orig"),
        (lambda: prune_query(ShapedSelfAttention(4, 2)), "weight_orig"),
        (lambda: Adapted(3, 4), "low_rank"),
    ],
)
def test_weights_that_would_stay_are_named_and_stay(make: Callable[[], nn.Module], left: str):
    """A weight that is computed from another had been drawn, and the other had stayed in silence."""
    model = make()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with refused("model must have reset_parameters", f"leaves {left} as it was"):
        reset_parameters(model)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]) or not name.endswith(left)
        assert weight.isfinite().all()


def test_weights_of_a_part_are_drawn_by_the_part():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3)
            self.head, self.bias = self.table.weight, nn.Parameter(torch.ones(5))

        def reset_parameters(self) -> None:
            nn.init.zeros_(self.bias)

    model = Tied()
    before = model.head.detach().clone()
    reset_parameters(model)
    assert not torch.equal(model.head, before)
    assert model.head is model.table.weight
    assert model.bias.eq(0).all()
