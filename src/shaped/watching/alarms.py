"""The rules: from the rows of a run to alarms, before it dies.

A layer's value at a row is the median of its last RECENT values, so one odd batch raises no alarm. A rule about change compares it with the
run's own history: the rows of the last WINDOW before those, without the first WARM_UP rows of the run, in which everything changes.
A forecast continues the trend of the logarithm over the last TREND rows. Numbers that are not finite are an alarm at once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from typing import Any

from shaped.diagnosis.verdicts import ENTROPY_COLLAPSE
from shaped.files import replace_non_finite
from shaped.watching.rows import Row

RECENT = 3
WARM_UP = 5
WINDOW = 40
LEAST_HISTORY = 10
"""Rows of history without which nothing is compared with it."""
TREND, HORIZON = 8, 20
"""Rows that a trend is fitted to, and rows ahead in which it may cross a threshold."""

ENTROPY_FALL = 2.0
"""By what factor a layer's share of the uniform entropy fell since its highest: one that starts at what a diagnosis calls a collapse
(ENTROPY_COLLAPSE) is no alarm."""
LOGITS_FATAL, LOGITS_HIGH, LOGITS_GROWTH = 100.0, 40.0, 4.0
"""The largest logit that is an alarm, the one from which on it is forecast, and by what factor it grew since its lowest. Wortsman et al.
2023: at large learning rates logits grow without bound before a run diverges. At 100 attention sees one key unless two logits are nearly
equal; in sound runs of the study's tuning half they stayed below 40."""
STREAM_GROWTH = 10.0
"""Factor of the residual stream's length within HORIZON rows, at the present rate, which is not below that of the TREND rows before: so it
is exponential growth. A large learning rate alone makes the stream grow ever more slowly."""
SLOWING = 0.05
"""A rate that is smaller by at most this share counts as not slower: rounding."""
BAND = 6.0
"""Half the width of the gradients' band, in robust standard deviations of the logarithm."""
BAND_UP, BAND_DOWN = 4.0, 10.0
"""Factors that the band has at least. Gradients fall by more than they rise while a run goes well."""
LOSS_RISE, LOSS_NOISE = 0.05, 6.0
"""Rise over the lowest loss so far, as a share of it, and in standard deviations of its noise: both must be exceeded."""

ADVICE = {
    "entropy collapse": "lower the learning rate or use QK-norm, which bounds the logits",
    "growing logits": "use QK-norm, or lower the learning rate of queries and keys",
    "growing residual stream": "lower the learning rate, add weight decay, or scale the branches down (shape with a smaller gamma)",
    "gradients above their band": "clip the gradients' norm, or lower the learning rate",
    "gradients below their band": "lower the learning rate, and look for layers that collapsed (shaped.diagnose)",
    "rising loss": "go back to a checkpoint, lower the learning rate or lengthen the warm-up",
    "non-finite values": "go back to a checkpoint, lower the learning rate and clip the gradients' norm",
}
"""The kinds of alarms, and what to try."""


@dataclass(frozen=True)
class Alarm:
    """A layer, or the loss, beyond a threshold, or on its way there. `print` shows it with what to try."""

    kind: str
    step: int
    layer: str
    """The one farthest beyond the threshold; empty for the loss."""
    value: float
    threshold: float
    steps_left: int | None = None
    """Of a forecast: steps until the threshold is crossed at the present rate. None: it was crossed."""

    @property
    def advice(self) -> str:
        """What to try."""
        return ADVICE[self.kind]

    def to_json(self) -> dict[str, Any]:
        """A line of watch.jsonl. A number that is not finite is None."""
        return asdict(self) | {"value": replace_non_finite(self.value), "advice": self.advice}

    def __str__(self) -> str:
        place = f" in {self.layer}" if self.layer else ""
        limit = "" if math.isnan(self.value) else f", threshold {self.threshold:.3g}"
        if self.steps_left is not None:
            limit = f", at this rate {self.threshold:.3g} in {self.steps_left} steps"
        return f"step {self.step}: {self.kind}{place}: {self.value:.3g}{limit}; try: {self.advice}"


class Alarms:
    """Judges the rows of a run one after another. `rows` are those before, of a run that is resumed.

    A kind of alarm is given once; again only after WINDOW rows in which nothing was beyond its threshold.
    """

    def __init__(self, rows: Iterable[Row] = ()):
        self._rows: list[Row] = []
        """The last rows, as many as the rules look at."""
        self._count = 0
        self._seen: dict[str, int] = {}
        self._highest_share: dict[str, float] = {}
        self._lowest_logit: dict[str, float] = {}
        self._lowest_loss = math.inf
        for row in rows:
            self.check(row)

    def check(self, row: Row) -> list[Alarm]:
        """The alarms of the next row."""
        self._rows = [*self._rows, row][-(RECENT + WINDOW) :]
        self._count += 1
        found = []
        for alarm in self._judge(row):
            if self._count - self._seen.get(alarm.kind, -WINDOW) >= WINDOW:
                found.append(alarm)
            self._seen[alarm.kind] = self._count
        return found

    def _judge(self, row: Row) -> Iterator[Alarm]:
        """What is beyond its threshold: of each kind the layer that is farthest beyond."""
        broken = find_non_finite(row)
        if broken is not None:
            yield Alarm("non-finite values", row.step, broken, math.nan, 0.0)
            return
        yield from self._judge_loss(row.step)
        candidates: dict[str, list[Alarm]] = {}
        for layer in row.quantities.get("entropy_share", {}):
            for alarm in (
                *self._judge_attention(row.step, layer),
                *self._judge_stream(row.step, layer),
                *self._judge_gradient(row.step, layer),
            ):
                candidates.setdefault(alarm.kind, []).append(alarm)
        for alarms in candidates.values():
            yield max(alarms, key=measure_excess)

    def _judge_loss(self, step: int) -> Iterator[Alarm]:
        losses = [row.loss for row in self._rows if row.loss is not None and math.isfinite(row.loss)]
        if self._count <= WARM_UP or len(losses) < LEAST_HISTORY:
            return
        loss = recent(losses)
        self._lowest_loss = min(self._lowest_loss, loss)
        noise = robust_scale([after - before for before, after in pairwise(losses)]) / math.sqrt(2.0)  # of one row
        limit = self._lowest_loss + max(LOSS_RISE * abs(self._lowest_loss), LOSS_NOISE * noise)
        if loss > limit:
            yield Alarm("rising loss", step, "", loss, limit)

    def _judge_attention(self, step: int, layer: str) -> Iterator[Alarm]:
        shares, logits = (collect(self._rows, name, layer) for name in ("entropy_share", "largest_logit"))
        share, logit = recent(shares), recent(logits)
        highest = self._highest_share[layer] = max(self._highest_share.get(layer, 0.0), share)
        lowest = self._lowest_logit[layer] = min(self._lowest_logit.get(layer, math.inf), logit)
        if share < highest / ENTROPY_FALL:
            if share < ENTROPY_COLLAPSE:
                yield Alarm("entropy collapse", step, layer, share, ENTROPY_COLLAPSE)
            elif left := self._forecast("entropy_share", layer, ENTROPY_COLLAPSE):
                yield Alarm("entropy collapse", step, layer, share, ENTROPY_COLLAPSE, left)
        if logit > LOGITS_GROWTH * lowest:
            if logit > LOGITS_FATAL:
                yield Alarm("growing logits", step, layer, logit, LOGITS_FATAL)
            elif logit > LOGITS_HIGH and (left := self._forecast("largest_logit", layer, LOGITS_FATAL)):
                yield Alarm("growing logits", step, layer, logit, LOGITS_FATAL, left)

    def _forecast(self, quantity: str, layer: str, limit: float) -> int | None:
        """Steps until the trend crosses the limit; None if it does not within HORIZON rows, or is not known yet."""
        points = collect_logs(self._rows, quantity, layer)[-TREND:]
        if self._count < WARM_UP + TREND or len(points) < TREND:
            return None
        rate, way = fit_rate(points), math.log(limit) - recent([log for _, log in points])
        horizon = HORIZON * (self._rows[-1].step - self._rows[-2].step)
        return math.ceil(way / rate) if rate * way > 0.0 and way / rate <= horizon else None

    def _judge_stream(self, step: int, layer: str) -> Iterator[Alarm]:
        points = collect_logs(self._rows, "length", layer)
        if self._count < WARM_UP + 2 * TREND or len(points) < 2 * TREND:
            return
        length = math.exp(recent([log for _, log in points]))
        left = self._forecast("length", layer, STREAM_GROWTH * length)
        if left is not None and fit_rate(points[-TREND:]) >= (1.0 - SLOWING) * fit_rate(points[-2 * TREND : -TREND]):
            yield Alarm("growing residual stream", step, layer, length, STREAM_GROWTH * length, left)

    def _judge_gradient(self, step: int, layer: str) -> Iterator[Alarm]:
        history = self._rows[max(0, WARM_UP - self._count + len(self._rows)) : -RECENT]
        gradient = recent(collect(self._rows, "gradient", layer))
        logs = [math.log(value) for value in collect(history, "gradient", layer) if value > 0.0]
        if len(logs) >= LEAST_HISTORY:
            middle, width = median(logs), BAND * robust_scale(logs)
            limit = math.exp(middle + max(width, math.log(BAND_UP)))
            if gradient > limit:
                yield Alarm("gradients above their band", step, layer, gradient, limit)
            limit = math.exp(middle - max(width, math.log(BAND_DOWN)))
            if gradient < limit:
                yield Alarm("gradients below their band", step, layer, gradient, limit)


def measure_excess(alarm: Alarm) -> float:
    """How far an alarm's value is beyond its threshold; negative for a forecast, and nearer to 0 the sooner the threshold is crossed."""
    return abs(math.log(max(alarm.value, 1e-30) / alarm.threshold)) if alarm.steps_left is None else -alarm.steps_left


def find_non_finite(row: Row) -> str | None:
    """The first layer whose stream or gradient is not finite; "" if it is the loss alone, None if all is finite.

    A row has inf there (`Row.of`), and nan for what was not measured. In a file both are null: so a nan counts if the loss is not finite.
    """
    loss_breaks = row.loss is not None and not math.isfinite(row.loss)
    for quantity in ("length", "gradient"):
        for layer, value in row.quantities.get(quantity, {}).items():
            if math.isinf(value) or (loss_breaks and math.isnan(value)):
                return layer
    return "" if loss_breaks else None


def collect(rows: Iterable[Row], quantity: str, layer: str) -> list[float]:
    """The finite values of one layer."""
    values = (row.quantities.get(quantity, {}).get(layer, math.nan) for row in rows)
    return [value for value in values if math.isfinite(value)]


def collect_logs(rows: Iterable[Row], quantity: str, layer: str) -> list[tuple[int, float]]:
    """Steps, and the logarithm of one layer's value where it is positive and finite."""
    values = ((row.step, row.quantities.get(quantity, {}).get(layer, math.nan)) for row in rows)
    return [(step, math.log(value)) for step, value in values if 0.0 < value < math.inf]


def recent(values: list[float]) -> float:
    return median(values[-RECENT:])


def median(values: list[float]) -> float:
    return statistics.median(values) if values else math.nan


def fit_rate(points: list[tuple[int, float]]) -> float:
    """Change a step: the median slope over all pairs (Theil 1950; Sen 1968), which one odd row hardly changes.

    The interval between rows may change, where a run is resumed with another one.
    """
    return statistics.median((after - before) / (later - earlier) for (earlier, before), (later, after) in combinations(points, 2))


def robust_scale(values: list[float]) -> float:
    """The standard deviation of a normal sample, from its median absolute deviation."""
    middle = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - middle) for value in values)
