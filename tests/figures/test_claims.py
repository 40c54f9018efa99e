"""Claims hold exactly when their interval is on the right side, and their intervals are what they say."""

import numpy as np
import pytest
from scipy.stats import kstwobign, t

from shaped.compare import distances
from shaped.figures.claims import FAMILY, TOLERANCE, agreement, bootstrap_interval, mean_interval, row, student
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


@pytest.mark.parametrize(("degrees", "error"), [(2, 0.035), (5, 0.003), (30, 1e-4)])
def test_students_quantile(degrees, error):
    assert student(degrees) == pytest.approx(t.ppf(0.975, degrees), rel=error)


def test_the_factor_for_a_family_is_kolmogorovs():
    assert pytest.approx(kstwobign.ppf(0.999) / kstwobign.ppf(0.95), rel=1e-3) == FAMILY


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
