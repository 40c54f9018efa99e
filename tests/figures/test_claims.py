"""Claims hold exactly when their interval is on the right side, and their intervals are what they say."""

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import ks_2samp, kstwobign, t

from shaped.compare import Distance, distances
from shaped.figures.claims import FAMILY, TOLERANCE, agreement, bootstrap_interval, mean_interval, row, separation, share_interval, student
from shaped.figures.stability import largest_rise
from stats import seed


@pytest.mark.parametrize(
    ("interval", "bound", "holds"),
    [
        ((0.9, 1.1), {"at_most": 1.2}, True),
        ((0.9, 1.1), {"at_most": 1.05}, False),
        ((0.9, 1.1), {"at_least": 0.8}, True),
        ((0.9, 1.1), {"at_least": 0.95}, False),
    ],
)
def test_the_whole_interval_must_be_on_the_right_side(interval, bound, holds):
    made = row("x", 4, "words", 1.0, interval, **bound)
    assert made["holds"] is holds
    assert ("reason" in made) is not holds
    assert made.keys() >= {"id", "claim", "value", "interval", "threshold", "holds"}
    assert made["id"] == "x.m4"


def test_a_failing_claim_says_why():
    made = row("x", 2, "words", 1.0, (0.9, 1.1), at_most=0.5, why="the moon was full")
    assert all(part in made["reason"] for part in ("0.9", "1.1", "at most 0.5", "the moon was full"))


def test_what_is_not_proved_is_told_from_what_is_wrong():
    assert "do not prove it" in row("x", 2, "words", 0.4, (0.1, 0.9), at_most=0.5, why="the moon was full")["reason"]
    assert "do not prove it" not in row("x", 2, "words", 0.6, (0.1, 0.9), at_most=0.5)["reason"]


@pytest.mark.parametrize(("degrees", "error"), [(1, 1e-6), (2, 1e-6), (3, 0.008), (5, 0.002), (30, 1e-4)])
def test_students_quantile(degrees, error):
    assert student(degrees) == pytest.approx(t.ppf(0.975, degrees), rel=error)


def test_the_factor_for_a_family_is_kolmogorovs():
    assert pytest.approx(kstwobign.ppf(0.999) / kstwobign.ppf(0.95), rel=1e-3) == FAMILY


def test_one_value_has_no_interval():
    assert mean_interval(np.array([0.3])) == (0.3, (-math.inf, math.inf))


def test_intervals_cover_the_truth_in_95_of_100_cases():
    rng = np.random.default_rng(seed(500))
    covered = np.array([low < 3.0 < high for _, (low, high) in (mean_interval(3.0 + rng.standard_normal(8)) for _ in range(4000))])
    assert abs(covered.mean() - 0.95) < 5 * (0.95 * 0.05 / 4000) ** 0.5
    intervals = (bootstrap_interval(rng.standard_normal(200), lambda x: float(np.median(x)), 0) for _ in range(100))
    covered = np.array([low < 0.0 < high for _, (low, high) in intervals])
    assert abs(covered.mean() - 0.95) < 5 * (0.95 * 0.05 / 100) ** 0.5 + 0.02  # the bootstrap's own error at 200 samples


def test_agreement_accepts_one_law_and_refuses_another():
    rng = np.random.default_rng(seed(501))
    x, y = rng.standard_normal((2, 4000, 1))
    same, _ = distances(x, y, 100, rng)
    other, _ = distances(x, y + 0.25, 100, rng)
    assert agreement("x", 4, "words", same)["holds"]
    refused = agreement("x", 4, "words", other)
    assert not refused["holds"]
    assert refused["threshold"] == pytest.approx(FAMILY * other.band + TOLERANCE)
    assert "band of one law" in refused["reason"]
    assert not refused["within_band"]


def test_separation_wants_the_whole_interval():
    far = Distance(0.3, 0.02, 0.05, 0.03, 0.01)
    assert separation("x", 4, "words", far, 0.25)["holds"]
    assert separation("x", 4, "words", far, 0.25)["interval"] == pytest.approx([0.2608, 0.3392])
    assert not separation("x", 4, "words", far, 0.27)["holds"]


def test_the_largest_rise_takes_the_upper_ends():
    """Of medians with intervals: a rise that is not seen may still be there."""
    flat = np.array([[0.5, 0.5, 0.5], [0.5, 0.5, 0.9]])
    assert largest_rise(flat) == (0.0, (0.0, pytest.approx(0.4)))
    falling = np.array([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.07, 0.01, 0.3], [0.06, 0.01, 0.5]])
    value, (low, high) = largest_rise(falling)
    assert (value, low) == (0.0, 0.0)
    assert high == pytest.approx(-0.01 + np.hypot(0.44, 0.06))
    up = np.array([[0.2, 0.1, 0.3], [0.6, 0.5, 0.9]])
    assert largest_rise(up) == (pytest.approx(0.4), (pytest.approx(0.4 - np.hypot(0.1, 0.1)), pytest.approx(0.4 + np.hypot(0.3, 0.1))))


def test_intervals_of_shares():
    """Wilson's: 0 of 2048 does not prove that nothing can happen; 8 of 800 is about 1 % ± 0.7 %."""
    none, (low, high) = share_interval(np.zeros(2048, dtype=bool))
    assert (none, low) == (0.0, 0.0)
    assert high == pytest.approx(3.8415 / (2048 + 3.8415), rel=1e-3)
    share, (low, high) = share_interval(np.arange(800) < 8)
    assert share == 0.01
    assert 0.004 < low < 0.006
    assert 0.019 < high < 0.020


def test_the_interval_of_a_distance_has_the_true_one_in_it():
    """Two samples of one law, again and again: 0 is in nearly every interval."""
    generator, inside = np.random.default_rng(seed(221)), 0
    for _ in range(60):
        found: Any = ks_2samp(*generator.standard_normal((2, 300)))
        made = agreement("a", 2, "b", Distance(float(found.statistic), 0.01, 1.358 * (2 / 300) ** 0.5, 0.05, 0.5))
        inside += made["interval"][0] == 0.0
    assert inside >= 60 * 0.95 - 5 * (60 * 0.05 * 0.95) ** 0.5
