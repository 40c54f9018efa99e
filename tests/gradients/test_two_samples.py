"""The helpers of verify_gradients.py: they accept one law, and see one that is 5 % off."""

import math

import numpy as np
import torch
from two_samples import correlate, find_kolmogorov, find_ks, find_two_sided, find_z

from shaped.compare import measure_distances
from shaped.testing.stats import assert_mean, generator


def draw(*shape, number):
    return torch.randn(*shape, generator=generator(number), dtype=torch.float64)


def test_kolmogorovs_probability_is_that_of_the_tables():
    """Smirnov's table of 1948."""
    quantiles = torch.tensor([1.2238, 1.3581, 1.6276, 1.9495], dtype=torch.float64)
    assert (find_kolmogorov(quantiles) / torch.tensor([0.1, 0.05, 0.01, 0.001], dtype=torch.float64) - 1).abs().max() < 2e-3
    assert (find_kolmogorov(torch.tensor([0.0, 0.1, 0.2])) - 1).abs().max() < 1e-9


def test_distances_are_those_of_compare():
    x, y = draw(2, 300, number=80), 1.1 * draw(2, 200, number=81) + 0.2
    found = find_ks(x, y)
    for row in range(2):
        ks, _ = measure_distances(x[row, :, None].numpy(), y[row, :, None].numpy(), 20, np.random.default_rng(0))
        assert math.isclose(found.value[row], ks.value, abs_tol=1e-9)


def test_probabilities_of_one_law_are_uniform_and_small_for_a_wrong_scale():
    """Less than uniform by the jumps of a distance, of size 1/500."""
    x, y = draw(1500, 500, number=82), draw(1500, 500, number=83)
    p = find_ks(x, y).p
    assert_mean((p[:, None] < torch.tensor([0.05, 0.2, 0.5, 0.8])).double(), torch.tensor([0.05, 0.2, 0.5, 0.8]).double(), bias=0.03)
    x, y = draw(2, 200_000, number=84), draw(2, 200_000, number=85)
    y[0] *= 1.05
    wrong, right = find_ks(x, y).p
    assert wrong < 1e-5 < right


def test_error_of_a_distance():
    """A shift of 1: the distance is that of the two shares at 1/2, and its error is found over 2000 pairs of samples."""
    found = find_ks(draw(2000, 400, number=86), draw(2000, 400, number=87) + 1.0)
    assert abs(found.error.mean() / found.value.std() - 1) < 0.1
    assert_mean(found.value, math.erf(0.5 / math.sqrt(2)), bias=0.015)


def test_correlations_have_their_errors_also_where_the_law_is_not_normal():
    """Exponentials of correlated normals: Fisher's error, (1 - r²)/sqrt(N), would be far too small."""
    a, b = draw(2000, 400, number=88), draw(2000, 400, number=89)
    x, y = (0.7 * a).exp(), (0.7 * (0.6 * a + 0.8 * b)).exp()
    rows = [correlate(one[None], two) for one, two in zip(x, y, strict=True)]
    value, error = torch.cat([row.value for row in rows]), torch.cat([row.error for row in rows])
    assert 0.85 < error.mean() / value.std() < 1.05
    assert error.mean() > 1.3 * (1 - value.mean() ** 2) / 20
    assert math.isclose(value[0], torch.corrcoef(torch.stack([x[0], y[0]]))[0, 1])


def test_correlations_that_differ_by_5_percent_are_seen():
    a, b, c, d = draw(4, 50_000, number=90)
    one, same, other = (correlate((r * x + math.sqrt(1 - r**2) * y)[None], x) for r, x, y in ((0.6, a, b), (0.6, c, d), (0.63, c, d)))
    assert find_z(one, same).abs() < 5 < find_z(one, other).abs()
    assert math.isclose(find_two_sided(torch.tensor([-1.959964])).item(), 0.05, rel_tol=1e-4)
