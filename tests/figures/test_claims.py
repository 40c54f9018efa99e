"""One rule makes all verdicts, and the intervals it reads are what they say."""

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import ks_2samp, norm, t

from shaped.compare import Distance, measure_distances
from shaped.figures.harness.claims import (
    TOLERANCE,
    bootstrap_interval,
    describe_verdicts,
    judge,
    judge_agreement,
    judge_separation,
    mean_interval,
    share_interval,
    student,
    verdict,
)
from shaped.figures.shared.stability import find_largest_rise
from shaped.testing.stats import seed


@pytest.mark.parametrize(
    ("interval", "bound", "outcome"),
    [
        ((0.9, 1.1), {"at_most": 1.2}, "holds"),
        ((0.9, 1.1), {"at_most": 1.1}, "holds"),
        ((0.9, 1.1), {"at_most": 1.05}, "not proved"),
        ((0.9, 1.1), {"at_most": 0.95}, "not proved"),
        ((0.9, 1.1), {"at_most": 0.85}, "fails"),
        ((0.9, 1.1), {"at_least": 0.8}, "holds"),
        ((0.9, 1.1), {"at_least": 0.95}, "not proved"),
        ((0.9, 1.1), {"at_least": 1.15}, "fails"),
        ((-math.inf, math.inf), {"at_least": 0.0}, "not proved"),
        ((-math.inf, 1.0), {"at_most": 1.0}, "holds"),
        ((-math.inf, 1.0), {"at_least": 1.1}, "fails"),
        ((0.0, 0.1953), {"at_most": 0.1938}, "not proved"),  # was said to hold
        ((0.0, 0.298), {"at_most": 0.01}, "not proved"),  # was said to fail, with a measured 0
    ],
)
def test_the_verdict_is_of_the_interval_and_the_threshold_alone(interval, bound, outcome):
    for value in (interval[0], 1.0, interval[1]):
        made = judge("x", 4, "words", value, interval, **bound)
        assert made["verdict"] == outcome
        assert verdict(made["interval"], made["relation"], made["threshold"]) == outcome
        assert ("reason" in made) is (outcome != "holds")
    assert made.keys() >= {"id", "claim", "value", "interval", "threshold", "verdict"}
    assert made["id"] == "x.m4"


def test_a_reason_has_the_numbers_and_what_is_known():
    made = judge("x", 2, "words", 1.0, (0.9, 1.1), at_most=0.5, why="the moon was full")
    assert all(part in made["reason"] for part in ("0.9", "1.1", "at most 0.5", "the moon was full"))
    assert "inside the interval" not in made["reason"]
    right = judge("x", 2, "words", 0.4, (0.1, 0.9), at_most=0.5, why="the moon was full")["reason"]
    assert "inside the interval" in right
    assert "moon" not in right
    wrong = judge("x", 2, "words", 0.6, (0.1, 0.9), at_most=0.5, why="the moon was full")["reason"]
    assert "inside the interval; the moon was full" in wrong


def test_verdicts_are_counted_in_the_same_words():
    rows = [judge("x", None, "words", 0.0, interval, at_most=1.0) for interval in ((0, 1), (0, 2), (0, 2), (2, 3))]
    assert describe_verdicts(rows) == "4 claims: holds 1, not proved 2, fails 1"
    assert describe_verdicts(rows[:1]).startswith("1 claim: ")
    assert describe_verdicts([]) == "no claims"


@pytest.mark.parametrize(("degrees", "error"), [(1, 1e-6), (2, 1e-6), (3, 0.008), (5, 0.002), (30, 1e-4)])
def test_students_quantile(degrees, error):
    assert student(degrees) == pytest.approx(t.ppf(0.975, degrees), rel=error)


def test_one_value_has_no_interval():
    assert mean_interval(np.array([0.3])) == (0.3, (-math.inf, math.inf))


def test_intervals_cover_the_truth_in_95_of_100_cases():
    rng = np.random.default_rng(seed(500))
    covered = np.array([low < 3.0 < high for _, (low, high) in (mean_interval(3.0 + rng.standard_normal(8)) for _ in range(4000))])
    assert abs(covered.mean() - 0.95) < 5 * (0.95 * 0.05 / 4000) ** 0.5
    intervals = (bootstrap_interval(rng.standard_normal(200), lambda x: float(np.median(x)), 0) for _ in range(100))
    covered = np.array([low < 0.0 < high for _, (low, high) in intervals])
    assert abs(covered.mean() - 0.95) < 5 * (0.95 * 0.05 / 100) ** 0.5 + 0.02  # the bootstrap's own error at 200 samples


def test_agreement_wants_the_whole_interval_below_the_tolerance():
    rng = np.random.default_rng(seed(501))
    x, y = rng.standard_normal((2, 30_000, 1))
    assert judge_agreement("x", 4, "words", measure_distances(x[:1000], y[:1000], 40, rng)[0])["verdict"] == "not proved"
    assert judge_agreement("x", 4, "words", measure_distances(x, y, 40, rng)[0])["verdict"] == "holds"
    other, _ = measure_distances(x, y + 0.25, 40, rng)
    refused = judge_agreement("x", 4, "words", other)
    assert refused["verdict"] == "fails"
    assert refused["threshold"] == TOLERANCE
    assert refused["interval"] == [other.value - other.band, other.value + other.band]


def test_separation_has_the_same_interval():
    far = Distance(0.3, 0.02, 0.05, 0.03, 0.01)
    assert judge_separation("x", 4, "words", far, 0.25)["verdict"] == "holds"
    assert judge_separation("x", 4, "words", far)["threshold"] == TOLERANCE
    assert (
        judge_separation("x", 4, "words", far, 0.25)["interval"]
        == judge_agreement("x", 4, "words", far)["interval"]
        == pytest.approx([0.25, 0.35])
    )
    assert judge_separation("x", 4, "words", far, 0.27)["verdict"] == "not proved"
    assert judge_separation("x", 4, "words", far, 0.36)["verdict"] == "fails"


def test_the_largest_rise_takes_the_upper_ends():
    """Of medians with intervals: a rise that is not seen may still be there."""
    flat = np.array([[0.5, 0.5, 0.5], [0.5, 0.5, 0.9]])
    assert find_largest_rise(flat) == (0.0, (0.0, pytest.approx(0.4)))
    falling = np.array([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.07, 0.01, 0.3], [0.06, 0.01, 0.5]])
    value, (low, high) = find_largest_rise(falling)
    assert (value, low) == (0.0, 0.0)
    assert high == pytest.approx(-0.01 + np.hypot(0.44, 0.06))
    up = np.array([[0.2, 0.1, 0.3], [0.6, 0.5, 0.9]])
    assert find_largest_rise(up) == (pytest.approx(0.4), (pytest.approx(0.4 - np.hypot(0.1, 0.1)), pytest.approx(0.4 + np.hypot(0.3, 0.1))))


def test_intervals_of_shares():
    """Wilson's: 0 of 2048 does not prove that nothing can happen; 8 of 800 is about 1 % ± 0.7 %."""
    none, (low, high) = share_interval(np.zeros(2048, dtype=bool))
    assert (none, low) == (0.0, 0.0)
    assert high == pytest.approx(3.8415 / (2048 + 3.8415), rel=1e-3)
    share, (low, high) = share_interval(np.arange(800) < 8)
    assert share == 0.01
    assert 0.004 < low < 0.006
    assert 0.019 < high < 0.020


@pytest.mark.parametrize("shift", [0.0, 0.05, 0.5])
def test_the_interval_of_a_distance_has_the_true_one_in_it(shift):
    """Normal laws of which one is shifted: in at least 95 % of cases, whether they are one law or far apart."""
    generator, inside = np.random.default_rng(seed(221)), 0
    exact = 2 * norm.cdf(shift / 2) - 1
    for _ in range(200):
        x, y = generator.standard_normal((2, 300))
        found: Any = ks_2samp(x, y + shift)
        low, high = judge_agreement("a", 2, "b", Distance(float(found.statistic), 0.01, 1.358 * (2 / 300) ** 0.5, 0.05, 0.5))["interval"]
        inside += low <= exact <= high
    assert inside >= 200 * 0.95 - 5 * (200 * 0.05 * 0.95) ** 0.5
