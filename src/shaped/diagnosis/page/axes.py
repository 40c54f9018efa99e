"""Axes of a chart: from numbers to places, and the numbers that are written beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from shaped.html.text import show

WIDTH, HEIGHT = 340.0, 196.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 10.0, 10.0, 32.0
TICKS = 5
DECADES = 9  # of a logarithmic axis at most; what is smaller lies at its foot


@dataclass(frozen=True)
class Axis:
    """The vertical axis."""

    low: float
    high: float
    logarithmic: bool

    def place(self, value: float) -> float:
        low, high, value = (math.log10(max(x, 1e-300)) if self.logarithmic else x for x in (self.low, self.high, value))
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return TOP + (1.0 - share) * (HEIGHT - TOP - BOTTOM)

    @property
    def ticks(self) -> list[float]:
        if self.logarithmic:
            first, last = math.floor(math.log10(self.low) + 1e-9), math.ceil(math.log10(self.high) - 1e-9)
            factors = (1, 2, 5) if last - first <= 2 else (1,)
            step = math.ceil((last - first + 1) / TICKS)
            found = [factor * 10.0**exponent for exponent in range(first, last + 1, step) for factor in factors]
            return [tick for tick in found if self.low * 0.999 <= tick <= self.high * 1.001]
        step = choose_step((self.high - self.low) / (TICKS - 1))
        return [step * number for number in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


def choose_axis(values: Iterable[float | None], logarithmic: bool = False, within: tuple[float, float] | None = None) -> Axis:
    """An axis that holds all values, and the interval `within`, if it is given. What leaves that by 5 % is drawn at its end."""
    known = [value for value in values if value is not None and (value > 0.0 or not logarithmic)] or [1.0]
    low, high = min(known), max(known)
    if logarithmic:
        low = max(low, high * 10.0**-DECADES)
        return Axis(round_down(low), choose_step(high) if choose_step(high) > round_down(low) else 2.0 * round_down(low), True)
    if within:
        slack = 0.05 * (within[1] - within[0])
        low, high = (within[0] if low > within[0] - slack else low), (within[1] if high < within[1] + slack else high)
    if high - low < 1e-3 * max(1e-6, abs(high)):
        low, high = (0.0, 2.0 * high) if high > 0.0 else (low - 0.5, high + 0.5)
    step = choose_step((high - low) / (TICKS - 1))
    return Axis(step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9), False)


def vary_much(values: Iterable[float | None]) -> bool:
    """Is a logarithmic axis needed?"""
    known = [value for value in values if value is not None and value > 0.0]
    return bool(known) and max(known) >= 10.0 * min(known)


def round_down(value: float) -> float:
    """To 1, 2 or 5 times a power of 10, the one before: 1/5 is 2/10."""
    return 1.0 / choose_step(1.0 / value)


def choose_step(least: float) -> float:
    """1, 2 or 5 times a power of 10, the next one."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= least * (1.0 - 1e-9))


def place_stage(stage: float, depth: int) -> float:
    """The horizontal place of a layer; 0 is before the first."""
    return LEFT + stage / max(depth, 1) * (WIDTH - LEFT - RIGHT)


def draw_layers(depth: int) -> str:
    """Numbers of some layers, below."""
    step = max(1, round(choose_step(depth / 6))) if depth > 6 else 1
    numbers = "".join(
        f'<text x="{place_stage(stage, depth):.1f}" y="{HEIGHT - 17:.1f}" text-anchor="middle">{stage}</text>'
        for stage in range(0, depth + 1, step)
    )
    return f'{numbers}<text x="{WIDTH - RIGHT:.1f}" y="{HEIGHT - 4:.1f}" text-anchor="end">layer</text>'


def write_ticks(ticks: list[float]) -> list[str]:
    """With three digits, or as many as they need: on an axis from 0.995 to 1.015 three would write 1.01 twice."""
    least = min((abs(b - a) for a, b in pairwise(ticks)), default=math.inf)
    digits = next((n for n in range(3, 15) if all(abs(float(f"{tick:.{n}g}") - tick) < 0.01 * least for tick in ticks)), 15)
    return [show(tick) if digits == 3 else f"{tick:.{digits}g}" for tick in ticks]


def draw_axis(axis: Axis) -> str:
    """Lines across the chart, with their numbers."""
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{axis.place(tick):.1f}" y2="{axis.place(tick):.1f}"/>'
        f'<text x="{LEFT - 5}" y="{axis.place(tick) + 4:.1f}" text-anchor="end">{label}</text>'
        for tick, label in zip(axis.ticks, write_ticks(axis.ticks), strict=True)
    )
