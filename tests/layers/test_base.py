"""What layers and chains have in common: how they are joined, what they refuse, and what they pass on to their parts."""

import math

import pytest
import torch

import shaped
from refusals import refused
from shaped.covariance import Point
from shaped.layers.base import Sizes
from shaped.randomness import Stream

A, B, C = shaped.ShapedAttention(0.6), shaped.ShapedFeedForward(0.5), shaped.ShapedPerceptron()
EYE = torch.eye(3, dtype=torch.float64)


def stream():
    return Stream(0, 0, dtype=torch.float64, device=torch.device("cpu"))


def test_chains_are_flat_and_made_of_layers_alone():
    assert shaped.Chain(A >> B, C).layers == (A, B, C)
    assert repr(A >> B >> C) == f"{A!r} >> {B!r} >> {C!r}"
    with pytest.raises(TypeError):
        A >> 3  # pyright: ignore[reportOperatorIssue, reportUnusedExpression] (wrong on purpose)
    with refused("layer", "3"):
        shaped.Chain(A, 3)  # pyright: ignore[reportArgumentType] (wrong on purpose)


@pytest.mark.parametrize("layer", [A, B, A >> B], ids=["attention", "feed-forward", "chain"])
def test_half_a_covariance_is_refused(layer: shaped.Layer):
    """Such as its upper triangle alone: drift and Sigma would be those of no covariance."""
    half = (EYE + 0.5).triu()
    for ask in (layer.drift, layer.Sigma, lambda V: layer.noise(V, torch.Generator())):
        with refused("V must be symmetric", "0.5"):
            ask(half)


def test_a_chain_applies_its_layers_in_order():
    chain, V, X = A >> C, 2.0 * EYE.expand(2, 3, 3), torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one, other = stream(), stream()
    expected = C.advance_gram(A.advance_gram(Point(matrix=V), Sizes(8), one), Sizes(8), one).V
    assert torch.equal(chain.advance_gram(Point(matrix=V), Sizes(8), other).V, expected)
    one, other = stream(), stream()
    expected = C.advance_tokens(A.advance_tokens(X, Sizes(8), one), Sizes(8), one)
    assert torch.equal(chain.advance_tokens(X, Sizes(8), other), expected)


@pytest.mark.parametrize("make", [shaped.PreLN, shaped.PostLN, lambda layer: layer >> shaped.ShapedAttention(0.5, heads=2)])
def test_the_parts_get_the_widths_the_generator_and_the_precision(make):
    layer = make(shaped.ShapedAttention(0.5, heads=3))
    with refused("heads", "8", "3"):
        layer.check_sizes(Sizes(8))
    one, other = (layer.module(12, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64) for _ in range(2))
    shapes = sorted({tuple(parameter.shape) for parameter in one.parameters()})
    assert (12, 15) in shapes  # queries and keys of three heads of width 5
    for mine, same in zip(one.parameters(), other.parameters(), strict=True):
        assert mine.dtype == torch.float64
        assert torch.equal(mine, same)


@pytest.mark.parametrize("make", [shaped.ShapedAttention, shaped.ShapedFeedForward, shaped.ReLUFeedForward])
def test_weights_of_branch_and_shortcut(make):
    for gamma in (0.0, 1.0):
        assert make(gamma).shortcut == 1.0 - gamma
        assert make(0.3, lam=gamma).shortcut == gamma
    assert make(0.6).shortcut == pytest.approx(0.8, rel=1e-15)
    for gamma in (-0.01, 1.01):
        with refused("gamma", str(gamma)):
            make(gamma)
        with refused("lam", str(gamma)):
            make(0.5, lam=gamma)


def test_a_shortcut_that_keeps_the_covariance_has_a_limit():
    exact = shaped.ShapedFeedForward(0.6, lam=0.8)
    assert torch.allclose(exact.Sigma(EYE), shaped.ShapedFeedForward(0.6).Sigma(EYE))
    assert shaped.ShapedFeedForward(0.6, lam=0.8 + 1e-11).limit()
    for lam in (0.8 + 1e-8, 0.8 - 1e-8):
        with pytest.raises(shaped.NoLimit, match="is not 1"):
            shaped.ShapedFeedForward(0.6, lam=lam).limit()


def test_layers_that_look_at_single_features():
    assert shaped.ShapedAttention(0.5, heads=2).needs_tokens
    assert (A >> shaped.ShapedAttention(0.5, heads=2) >> B).needs_tokens
    assert shaped.PostLN(A).needs_tokens
    for layer in (A, B, C, A >> B >> C, shaped.ShapedAttention(0.5, heads=2, project=True), shaped.ReLUFeedForward(0.5)):
        assert layer.needs_tokens is False
    with refused("path", "tokens", "PreLN"):
        shaped.PreLN(A).advance_gram(Point(matrix=EYE[None]), Sizes(8), stream())


def test_wrong_covariances_and_generators():
    with refused("generator", "None"):
        A.noise(EYE, None)  # pyright: ignore[reportArgumentType] (wrong on purpose)
    with refused("V", "positive semi-definite"):
        A.noise(-EYE, torch.Generator())
    for ask in (A.drift, A.Sigma):
        with refused("V", "(2, 3)"):
            ask(torch.ones(2, 3))
    with refused("n must", "0"):
        Sizes(0)
    with refused("n_k", "0"):
        Sizes(4, 0)


def test_tokens_start_with_exactly_the_covariance():
    """At any width from m on; the direction is drawn, and differs from path to path."""
    V0 = torch.stack([shaped.equicorrelated(3, 0.2), torch.diag(torch.tensor([1.0, 4.0, 0.25], dtype=torch.float64))])
    still = shaped.ShapedAttention(0.0, heads=1)
    for n in (3, 10):
        paths = shaped.propagate(still, V0, n=n, d=1, seed=0, path="tokens")
        assert torch.allclose(paths.V[-1], V0, rtol=1e-12, atol=1e-14)
        assert paths.t.tolist() == [0.0, 1.0 / n]
    assert paths.info == {"path": "tokens", "n": 10, "d": 1, "seed": 0}
    assert math.isinf(paths.stopped.min())
