"""Density estimates: of a normal, and of correlations, whose mass stays between -1 and 1."""

import numpy as np
from scipy.stats import norm

from shaped.figures.shared.density import correlation_density, kernel_density, pairs
from shaped.testing.stats import seed


def test_kernel_density_of_a_normal():
    x = np.random.default_rng(seed(40)).standard_normal(100_000)
    grid = np.linspace(-4, 4, 101)
    assert np.abs(kernel_density(x, grid) - norm.pdf(grid)).max() < 0.05 * norm.pdf(0)


def test_correlation_density_keeps_its_mass_inside():
    rho = np.tanh(1.0 + np.random.default_rng(seed(41)).standard_normal(50_000))
    grid = np.tanh(np.linspace(-4.95, 4.95, 501))  # dense where the density is steep
    density = correlation_density(rho, grid)
    exact = norm.pdf(np.arctanh(grid), 1.0) / (1 - grid**2)
    inside = np.abs(grid) < 0.99
    assert np.abs(density - exact)[inside].max() < 0.05 * exact[inside].max()
    assert abs(np.trapezoid(density, grid) - norm.cdf(4.95, 1.0)) < 0.01


def test_pairs_are_above_the_diagonal():
    assert pairs(np.arange(9.0).reshape(3, 3)).tolist() == [1, 2, 5]
