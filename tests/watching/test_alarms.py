"""The rules of the alarms: each fires a little beyond its threshold, and not a little before."""

import math
from typing import Any

import pytest

from shaped.watching import alarms
from shaped.watching.alarms import ADVICE, Alarm, Alarms
from shaped.watching.rows import Row

ROWS = 40
SOUND: dict[str, float] = {"entropy_share": 0.6, "largest_logit": 8.0, "length": 2.0, "gradient": 0.3}


def make_rows(later: dict[str, Any], rows: int = ROWS) -> list[Row]:
    """Sound values with a small ripple; those of the second layer, or the loss, change over the last RECENT rows."""
    made = []
    for number in range(rows + alarms.RECENT):
        ripple = 1.0 + 0.01 * (-1) ** number
        values = {name: {"first": value * ripple, "second": value * ripple} for name, value in SOUND.items()}
        loss = 3.0 * (1.0 + 0.001 * (-1) ** number)
        if number >= rows:
            loss = later.get("loss", loss)
            for name in later.keys() - {"loss"}:
                values[name]["second"] = later[name]
        made.append(Row(number, loss, values))
    return made


def find_alarms(rows: list[Row]) -> list[Alarm]:
    rules = Alarms()
    return [alarm for row in rows for alarm in rules.check(row)]


LIMITS = {
    "entropy collapse": ("entropy_share", alarms.ENTROPY_COLLAPSE),
    "growing logits": ("largest_logit", alarms.LOGITS_FATAL),
    "gradients above their band": ("gradient", 0.3 * alarms.BAND_UP),
    "gradients below their band": ("gradient", 0.3 / alarms.BAND_DOWN),
    "rising loss": ("loss", 3.0 * 0.999 * (1.0 + alarms.LOSS_RISE)),
}


@pytest.mark.parametrize("kind", LIMITS)
def test_thresholds(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(alarms, "HORIZON", 0)  # no forecasts
    quantity, limit = LIMITS[kind]
    beyond = 0.95 if kind in ("entropy collapse", "gradients below their band") else 1.05
    if quantity == "loss":
        beyond = 1.01  # 5 % of the loss is the whole threshold
    assert find_alarms(make_rows({quantity: limit / beyond})) == []
    (alarm,) = find_alarms(make_rows({quantity: limit * beyond}))
    assert (alarm.kind, alarm.layer) == (kind, "" if quantity == "loss" else "second")
    assert alarm.step == ROWS + alarms.RECENT // 2  # a median of three: the second odd row
    assert alarm.value == pytest.approx(limit * beyond)
    assert alarm.threshold == pytest.approx(limit, rel=0.02)
    assert str(alarm).endswith(ADVICE[kind])


@pytest.mark.parametrize(
    ("quantity", "kind", "start", "rate"),
    [
        ("entropy_share", "entropy collapse", 1.0, -0.1),
        ("entropy_share", "entropy collapse", 0.9, -0.05),
        ("largest_logit", "growing logits", 4.0, 0.04),
    ],
)
def test_forecasts(quantity: str, kind: str, start: float, rate: float):
    """An exponential from row 20 on is an alarm HORIZON rows before it crosses the threshold, to within a row and the median's delay."""
    rows = [
        Row(10 * n, None, {"entropy_share": {"a": 0.9}} | {quantity: {"a": start * math.exp(rate * max(0, n - 20))}}) for n in range(100)
    ]
    (alarm, *_) = find_alarms(rows)
    assert alarm.kind == kind
    assert abs(math.log(alarm.value / alarm.threshold)) == pytest.approx(abs(rate) * (alarms.HORIZON - 0.5), abs=0.5 * abs(rate) + 1e-9)
    crossing = 20 + math.log(alarm.threshold / start) / rate
    assert alarm.step / 10 == math.ceil(crossing - alarms.HORIZON) + 1
    assert alarm.steps_left is not None
    assert alarm.steps_left == pytest.approx(10 * (crossing + 1) - alarm.step, abs=1.0)
    assert f"in {alarm.steps_left} steps; try" in str(alarm)


@pytest.mark.parametrize(("share", "expected"), [(1.05, ["growing residual stream"]), (0.95, [])])
def test_the_stream_may_grow_but_not_tenfold_within_the_horizon(share: float, expected: list[str]):
    rate = share * math.log(alarms.STREAM_GROWTH) / alarms.HORIZON
    rows = [Row(n, None, {"entropy_share": {"a": 0.9}, "length": {"a": 2.0 * math.exp(rate * n)}}) for n in range(40)]
    found = find_alarms(rows)
    assert [alarm.kind for alarm in found] == expected
    assert all(
        alarm.steps_left == alarms.HORIZON / share // 1 + 1 and alarm.step == alarms.WARM_UP + 2 * alarms.TREND - 1 for alarm in found
    )
    slowing = [Row(n, None, {"entropy_share": {"a": 0.9}, "length": {"a": 2.0 * math.exp(1.5 * (n + 1) ** 0.7)}}) for n in range(40)]
    assert not find_alarms(slowing)


def test_slow_changes_and_first_rows_are_no_forecast():
    for begin, rate in ((20, 0.01), (0, 0.25)):
        logits = [min(38.0, 4.0 * math.exp(rate * max(0, n - begin))) for n in range(100)]
        assert not find_alarms(
            [Row(n, None, {"entropy_share": {"a": 0.9}, "largest_logit": {"a": value}}) for n, value in enumerate(logits)]
        )


def test_bands_are_as_wide_as_the_history_scatters():
    rows = make_rows({"gradient": 0.3 * 4.0 * 1.05})
    wide = [Row(row.step, row.loss, row.quantities | {"gradient": dict(row.quantities["gradient"])}) for row in rows]
    for number, row in enumerate(wide[:ROWS]):
        row.quantities["gradient"]["second"] *= math.exp(0.5 * (number % 4 - 1.5))  # six deviations are more than a factor of 4
    assert find_alarms(rows)
    assert not find_alarms(wide)


def test_one_odd_batch_and_a_start_that_is_low_are_no_alarms():
    rows = make_rows({})
    rows[30].quantities["gradient"]["first"] = 100.0
    rows[31].quantities["entropy_share"]["second"] = 0.0
    rows[32].quantities["largest_logit"]["second"] = 1e4
    assert not find_alarms(rows)
    for row in rows:
        row.quantities["entropy_share"] = {"first": 0.04, "second": 0.6}
        row.quantities["largest_logit"] = {"first": 300.0, "second": 8.0}
    assert not find_alarms(rows)


def test_a_kind_is_given_again_only_after_a_quiet_window():
    rules, given = Alarms(), []
    for number in range(3 * alarms.WINDOW):
        share = 0.01 if number in (*range(20, 30), *range(40, 50), *range(50 + alarms.WINDOW, 60 + alarms.WINDOW)) else 0.6
        given += rules.check(Row(number, 3.0, {"entropy_share": {"a": share}}))
    assert [alarm.step for alarm in given] == [21, 51 + alarms.WINDOW]


@pytest.mark.parametrize(
    ("loss", "length", "gradient", "layer"),
    [
        (math.nan, 2.0, 0.3, ""),
        (math.inf, math.nan, 0.3, "a"),
        (3.0, math.inf, 0.3, "a"),
        (None, 2.0, math.inf, "a"),
        (None, math.nan, 0.3, None),
    ],
)
def test_values_that_are_not_finite(loss: float | None, length: float, gradient: float, layer: str | None):
    """nan alone is a quantity that was not measured."""
    found = Alarms().check(Row(7, loss, {"entropy_share": {"a": 0.6}, "length": {"a": length}, "gradient": {"a": gradient}}))
    assert [(alarm.kind, alarm.step, alarm.layer) for alarm in found] == ([] if layer is None else [("non-finite values", 7, layer)])
    assert all(alarm.to_json()["value"] is None for alarm in found)


def test_a_resumed_run_knows_what_was_before():
    rows = make_rows({"gradient": 10.0})
    assert find_alarms(rows)
    assert not find_alarms(rows[-5:])
    rules = Alarms(rows[:-2])
    assert [alarm.kind for row in rows[-2:] for alarm in rules.check(row)] == ["gradients above their band"]


def test_a_row_of_another_program_is_no_error():
    assert not find_alarms([Row(number, 3.0, {}) for number in range(20)])


def test_a_trend_is_that_of_steps_where_the_interval_changes():
    """A run is resumed with a tenth of the interval: the trend of its rows is that of the steps, not ten times as steep."""
    rows = []
    for step in (*range(0, 4200, 100), *range(4200, 4800, 10)):
        logit = 5.0 * math.exp(0.0005 * step)  # 40 at step 4,159, 100 at step 5,991
        rows.append(Row(step, None, {"entropy_share": {"a": 0.9}, "largest_logit": {"a": logit}}))
    assert not find_alarms(rows)
