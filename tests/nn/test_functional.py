"""The formulas that networks and modules share, number by number."""

import math

import pytest
import torch

from refusals import refused
from shaped.nn.functional import attention_matrix, he_constant, layer_norm, logit_bias, shaped_relu

X = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0], dtype=torch.float64)


@pytest.mark.parametrize("positive", [1.0, 0.0, 0.7, -0.4])
@pytest.mark.parametrize("negative", [0.0, 0.3, 1.2])
@pytest.mark.parametrize("trained", ["neither", "negative", "positive", "both"])
def test_the_shaped_relu(positive, negative, trained):
    expected = [(positive if x > 0 else negative) * x for x in X.tolist()]
    slopes = [
        torch.tensor(slope, dtype=torch.float64) if trained in (name, "both") else slope
        for name, slope in (("negative", negative), ("positive", positive))
    ]
    assert shaped_relu(X, *slopes).tolist() == pytest.approx(expected, abs=1e-15)


def test_the_positive_slope_is_1_unless_given():
    assert shaped_relu(X, 0.3).tolist() == shaped_relu(X, 0.3, 1.0).tolist() == [-0.6, -0.15, 0.0, 0.5, 2.0]
    assert he_constant(0.5) == he_constant(0.5, 1.0) == 1.6


def test_a_trained_slope_of_half_precision_tokens():
    x = torch.tensor([-1.0, 1.0], dtype=torch.bfloat16)
    for slopes in ((torch.tensor(0.5), 1.0), (0.5, torch.tensor(1.0)), (torch.tensor(0.5), 2.0)):
        found = shaped_relu(x, *slopes)
        assert found.dtype == torch.bfloat16
        assert found.tolist() == [-0.5, float(slopes[1])]


def test_a_trained_slope_stays_on_its_device_whatever_the_default_one_is():
    """As within torch.device("cuda:0") with a model on another GPU."""
    slope = torch.tensor([0.3], dtype=torch.float64)
    with torch.device("meta"):
        found = shaped_relu(X, slope)
    assert torch.equal(found, shaped_relu(X, slope))


def test_he_constant_keeps_the_variance():
    assert he_constant(0.3, 0.7) == pytest.approx(2 / (0.09 + 0.49), rel=1e-15)
    assert he_constant(0.0) == he_constant(1.0, 0.0) == 2.0
    for slopes in ((0.0, 0.0), (-0.0, 0.0)):
        with refused("negative_slope", "0.0"):
            he_constant(*slopes)


def test_attention_matrices():
    """A = gamma1 I + softmax(Y + B) - gamma2 softmax(B), for each head, also where there are more keys than queries."""
    g = torch.Generator().manual_seed(1)
    for rows, columns in ((3, 3), (2, 4)):
        Y, B = (torch.randn(2, rows, columns, generator=g, dtype=torch.float64) for _ in range(2))
        B[:, 0, 1] = -math.inf
        found, usual = attention_matrix(Y, B, 0.6, 0.7), attention_matrix(Y, B)
        assert torch.equal(attention_matrix(Y[1:], B[1]), usual[1:])
        for h in range(2):
            for i in range(rows):
                with_logits = [math.exp(Y[h, i, j] + B[h, i, j]) for j in range(columns)]
                resting = [math.exp(B[h, i, j]) for j in range(columns)]
                for j in range(columns):
                    there, rest = with_logits[j] / sum(with_logits), resting[j] / sum(resting)
                    assert found[h, i, j].item() == pytest.approx(0.6 * (i == j) + there - 0.7 * rest, abs=1e-14)
                    assert usual[h, i, j].item() == pytest.approx((i == j) + there - rest, abs=1e-14)


def test_biases():
    like = torch.zeros(1, dtype=torch.float32)
    assert logit_bias(None, 2, like).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert logit_bias("causal", 3, like).tolist() == [[0.0, -math.inf, -math.inf], [0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]]
    given = torch.ones(4, 2, 2, dtype=torch.float64)
    assert logit_bias(given, 2, like).dtype == torch.float32
    for shape in ((3, 2, 2), (2, 3), (3, 2)):
        with refused("mask", "3 x 3", " x ".join(map(str, shape))):
            logit_bias(torch.zeros(shape), 3, like)


def test_layer_norm():
    """Mean 0 and variance 1 over the features of each token; 1e-5 is added to the variance."""
    x = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 0.006]], dtype=torch.float64)
    expected = [[(v - 3) / math.sqrt(14 / 3 + 1e-5) for v in (1, 2, 6)], [(v - 0.002) / math.sqrt(8e-6 + 1e-5) for v in (0, 0, 0.006)]]
    assert layer_norm(x).flatten().tolist() == pytest.approx(expected[0] + expected[1], rel=1e-12)
