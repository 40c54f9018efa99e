"""Layers that commute with rotations: few coordinates have the law of all n features."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from autograd_networks import LAYERS, assert_one_law, cross_entropy, simulate, squared_error
from torch import Tensor, nn

import shaped
from shaped.gradients import network
from shaped.gradients.frames import enter_frame
from shaped.gradients.products import Products
from shaped.layers import Sizes
from shaped.randomness import Stream
from shaped.testing.stats import assert_mean, assert_rejected, generator, seed

M, N = 2, 12
ALIKE = shaped.equicorrelated(3, 1.0)


def leave_frame(Y: Tensor, D: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The tokens in their frame, and the gradient D there in the frame of Y, for no products."""
    stream = Stream(seed(number), 0, dtype=Y.dtype, device=Y.device)
    Y = Y.clone().requires_grad_()
    X = enter_frame(Y, N, Products(stream, stream))
    (gradient,) = torch.autograd.grad(X, Y, D)
    return X.detach(), gradient


def draw(count: int, columns: int, number: int) -> Tensor:
    """Random tokens or gradients of which the first columns are not zero."""
    X = torch.zeros(count, M, 4 * M, dtype=torch.float64)
    return X.index_copy(-1, torch.arange(columns), torch.randn(count, M, columns, generator=generator(number), dtype=torch.float64))


@pytest.mark.parametrize("collapsed", [False, True])
def test_a_frame_keeps_inner_products(collapsed):
    Y, D = draw(50, 2 * M, 60), draw(50, 4 * M, 61)
    if collapsed:
        Y[:, 1] = Y[:, 0]
    X, gradient = leave_frame(Y, D, 62)
    assert torch.allclose(X @ X.mT, Y @ Y.mT)
    assert not X[..., M:].any()
    assert torch.allclose(gradient @ gradient.mT, D @ D.mT)
    assert torch.allclose(gradient @ Y.mT, D @ X.mT)


def test_the_part_across_the_tokens_is_uniform():
    """It has n - m directions, of which m are in the frame; its mean square there is that of any other m directions."""
    count = 20_000
    Y, D = draw(1, 2 * M, 63), draw(1, 4 * M, 64)
    _, gradient = leave_frame(Y.expand(count, -1, -1), D.expand(count, -1, -1), 65)
    O = torch.linalg.qr(Y[0, :, : 2 * M].mT).Q
    across = gradient[..., : 2 * M] - gradient[..., : 2 * M] @ O @ O.mT
    square = D[0, :, M:] @ D[0, :, M:].mT * M / (N - M)
    assert_mean(across @ across.mT, square)
    assert_rejected(lambda: assert_mean(across @ across.mT, 1.05 * square))
    assert_mean(across, 0.0)


@pytest.mark.parametrize("independent", [False, True])
def test_frames_have_the_law_of_all_features(independent, monkeypatch):
    layer = LAYERS["shaped"]
    V0 = shaped.equicorrelated(3, 0.2)
    framed = simulate(layer, V0, 12, 4, cross_entropy, 3000, 66, independent=independent)
    monkeypatch.setattr(network, "fits_frame", lambda m, n: False)
    assert_one_law(framed, simulate(layer, V0, 12, 4, cross_entropy, 3000, 67, independent=independent))


@pytest.mark.parametrize("layer", [LAYERS["shaped"], shaped.PostLN(shaped.ShapedAttention(0.6).unshaped)])
def test_collapsed_tokens_have_the_same_law_in_single_precision(layer):
    """With frames and without. Gradients of queries and keys are rounding errors here."""
    single, double = (
        simulate(layer, ALIKE, 16, 3, squared_error, 2500, 68 + place, dtype=dtype)
        for place, dtype in enumerate((torch.float32, torch.float64))
    )
    assert single["tokens 0"].dtype == torch.float32
    assert_one_law(
        *({name: row.double() for name, row in found.items() if "query" not in name and "key" not in name} for found in (single, double))
    )


@pytest.mark.parametrize(
    ("layer", "n", "framed"),
    [
        (shaped.ShapedAttention(0.5), 12, True),
        (shaped.ShapedAttention(0.5), 11, False),
        (shaped.ShapedAttention(0.5, heads=2), 12, False),
        (shaped.ShapedAttention(0.5, heads=2, project=True, qk_norm=True), 12, True),
        (LAYERS["shaped"], 12, True),
        (LAYERS["Pre-LN"], 12, False),
        (shaped.ShapedAttention(0.5) >> shaped.ShapedPerceptron(), 12, False),
    ],
)
def test_only_layers_that_commute_with_rotations_have_frames(layer, n, framed):
    assert network.WeightlessLayer(layer, Sizes(n), ALIKE, 3).framed is framed
    assert not network.WeightlessLayer(layer, Sizes(n), ALIKE).framed, "tokens that are given have n features"


class Reversed(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(-input)


@dataclass(frozen=True)
class Made(shaped.ShapedAttention):
    """A layer of a user, whose module is a Sequential that computes something else."""

    def module(self, n: int, n_k: int | None = None, **draw: Any) -> nn.Module:
        return Reversed(super().module(n, n_k, **draw))


def test_modules_of_users_run_as_they_are():
    made = network.WeightlessLayer(Made(0.5), Sizes(16), ALIKE, 3)
    assert not made.framed
    assert type(made.module) is Reversed
