"""Drift and Sigma are the theorems' sums, to 1e-12."""

import math

import numpy as np
import oracle
import pytest
import torch

import shaped
from shaped.testing.stats import random_covariance


def bias_for(kind: str, m: int) -> torch.Tensor:
    if kind == "full":
        return torch.zeros(m, m, dtype=torch.float64)
    if kind == "causal":
        return torch.zeros(m, m, dtype=torch.float64).masked_fill(~torch.ones(m, m).tril().bool(), -math.inf)
    if kind == "alibi":
        place = torch.arange(m, dtype=torch.float64)
        return -0.5 * (place[:, None] - place).abs()
    random = torch.randn(m, m, generator=torch.Generator().manual_seed(10 * m), dtype=torch.float64)
    random[0, -1] = -math.inf if m > 1 else 0.0
    return random


def mask_for(kind: str, m: int):
    return {"full": None, "causal": "causal"}.get(kind, bias_for(kind, m))


def close(ours: torch.Tensor, theirs: np.ndarray) -> None:
    assert np.abs(ours.numpy() - theirs).max() <= 1e-12 * max(np.abs(theirs).max(), 1e-300)


@pytest.mark.parametrize("m", range(1, 7))
@pytest.mark.parametrize("kind", ["full", "causal", "alibi", "random"])
@pytest.mark.parametrize(("heads", "project"), [(1, False), (8, True)])
def test_attention(m, kind, heads, project):
    V = random_covariance(m, m)
    P = oracle.resting(bias_for(kind, m).numpy())
    S1, S2 = oracle.logit_moments(V.numpy(), P)
    layer = shaped.ShapedAttention(0.6, 0.7, heads=heads, project=project, mask=mask_for(kind, m))
    if m == 1:  # a single token has no one to attend to but itself
        assert layer.drift(V).abs().max() < 1e-15
    else:
        close(layer.drift(V), oracle.attention_drift(V.numpy(), P, S1, S2, 0.6, 0.7))
    close(layer.Sigma(V), oracle.attention_sigma(V.numpy(), P, S1, 0.6, 0.7, heads, project))


@pytest.mark.parametrize("m", [2, 3, 5])
@pytest.mark.parametrize("project", [False, True])
def test_heads_with_biases_of_their_own(m, project):
    """ALiBi with 8 heads: each head is centred at its own resting attention, and adds an eighth of drift and of the noise."""
    V, mask = random_covariance(m, m), shaped.alibi(m, 8)
    layer = shaped.ShapedAttention(0.6, 0.7, heads=8, project=project, mask=mask)
    drifts, Sigmas = [], []
    for bias in mask:
        P = oracle.resting(bias.numpy())
        S1, S2 = oracle.logit_moments(V.numpy(), P)
        drifts.append(oracle.attention_drift(V.numpy(), P, S1, S2, 0.6, 0.7))
        Sigmas.append(oracle.attention_sigma(V.numpy(), P, S1, 0.6, 0.7, 8, project))
    close(layer.drift(V), np.mean(drifts, 0))
    close(layer.Sigma(V), np.mean(Sigmas, 0))


def test_alibi_is_that_of_its_authors():
    """For 8 heads the slopes are 1/2, 1/4, … 1/256; for 12 those, and every second one of 16 heads' (Press et al. 2022, Sec. 3)."""
    eight, twelve = shaped.alibi(4, 8), shaped.alibi(4, 12)
    assert (-eight[:, 3, 2]).tolist() == [2.0**-k for k in range(1, 9)]
    assert (-twelve[8:, 3, 2]).tolist() == [2.0**-k for k in (0.5, 1.5, 2.5, 3.5)]
    assert torch.equal(twelve[:8], eight)
    assert (eight[:, 3, 0] == 3 * eight[:, 3, 2]).all()
    assert (eight[:, 0, 1:] == -math.inf).all()


def test_equal_biases_are_one():
    """The same bias for every head is the bias for all of them: one term, the same numbers."""
    V, bias = random_covariance(4, 0), bias_for("random", 4)
    one, other = (shaped.ShapedAttention(0.6, 0.7, heads=4, mask=mask) for mask in (bias, bias.expand(4, 4, 4)))
    assert len(other.terms) == 2
    assert torch.equal(one.drift(V), other.drift(V))
    assert torch.equal(one.Sigma(V), other.Sigma(V))


@pytest.mark.parametrize("m", range(2, 7))
def test_attention_as_printed_in_the_paper(m):
    V = random_covariance(m, m)
    P = np.full((m, m), 1 / m)
    S1, S2 = oracle.paper_moments(V.numpy())
    layer = shaped.ShapedAttention(0.6, 0.7)
    close(layer.drift(V), oracle.attention_drift(V.numpy(), P, S1, S2, 0.6, 0.7))
    close(layer.Sigma(V), oracle.attention_sigma(V.numpy(), P, S1, 0.6, 0.7))


@pytest.mark.parametrize("m", range(1, 7))
def test_feedforward(m):
    V = random_covariance(m, m)
    b, Sigma = oracle.relu_drift(V.numpy(), 0.3, -1.2), oracle.linear_sigma(V.numpy())
    residual, perceptron = shaped.ShapedFeedForward(0.6, 0.3, -1.2), shaped.ShapedPerceptron(0.3, -1.2)
    assert (residual.drift(V).numpy() - 0.36 * b).__abs__().max() < 1e-14
    assert (perceptron.drift(V).numpy() - b).__abs__().max() < 1e-14
    close(residual.Sigma(V), 0.72 * Sigma)
    close(perceptron.Sigma(V), Sigma)
    if m > 1:
        close(residual.drift(V), 0.36 * b)


def test_causal_mask_is_the_bias_and_the_booleans():
    m, V = 5, random_covariance(5, 0)
    by_name = shaped.ShapedAttention(0.5, mask="causal")
    for mask in (bias_for("causal", m), torch.ones(m, m).tril().bool()):
        other = shaped.ShapedAttention(0.5, mask=mask)
        close(by_name.drift(V), other.drift(V).numpy())  # running means in place of products: equal to rounding
        assert torch.equal(by_name.Sigma(V), other.Sigma(V))


def test_causal_tokens_do_not_see_the_future():
    """The drift of the first tokens is that of the first tokens alone."""
    V, layer = random_covariance(6, 0), shaped.ShapedAttention(0.5, mask="causal")
    assert torch.allclose(layer.drift(V)[:4, :4], layer.drift(V[:4, :4]), rtol=1e-13, atol=1e-15)
