"""Every helper accepts the truth and rejects an error of 5 %."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from shaped.testing.stats import assert_covariance, assert_distribution, assert_mean, assert_same_moments, generator


def test_mean_accepts_truth_and_rejects_five_percent():
    x = 1.0 + 0.5 * torch.randn(10_000, 3, generator=generator(1), dtype=torch.float64)
    assert_mean(x, 1.0)
    assert_mean(x, 1.05, bias=0.05)
    with pytest.raises(AssertionError):
        assert_mean(x, 1.05)


def test_covariance_accepts_truth_and_rejects_five_percent():
    root = torch.tensor([[1.0, 0.0], [0.5, 1.0]], dtype=torch.float64)
    x = torch.randn(200_000, 2, generator=generator(2), dtype=torch.float64) @ root.mT
    assert_covariance(x, root @ root.mT)
    with pytest.raises(AssertionError):
        assert_covariance(x, 1.05 * root @ root.mT)


def test_distribution_accepts_truth_and_rejects_five_percent():
    x = torch.randn(200_000, generator=generator(3), dtype=torch.float64)
    points = np.linspace(-8, 8, 2001)
    assert_distribution(x, points, norm.cdf(points))
    with pytest.raises(AssertionError):
        assert_distribution(x, points, norm.cdf(points, scale=1.05))
    with pytest.raises(AssertionError):
        assert_distribution(x, points, norm.cdf(points, loc=0.05))


def test_same_moments_accepts_truth_and_rejects_five_percent():
    g = generator(4)
    x, y = (torch.randn(200_000, 2, generator=g, dtype=torch.float64) for _ in range(2))
    assert_same_moments(x, y)
    skewed = (x + 0.03 * (x**2 - 1)) / 1.0009
    for wrong in (x + 0.05, 1.05 * x, skewed):
        with pytest.raises(AssertionError):
            assert_same_moments(wrong, y)
