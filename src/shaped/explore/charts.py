"""Charts as the page draws them: dictionaries for JSON. Numbers that are not finite are None."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Chart = dict[str, Any]
Series = dict[str, Any]
BAND = (0.05, 0.5, 0.95)
DIGITS = 5


def as_list(values: Tensor) -> list[Any]:
    """Numbers with a few digits: the page draws pixels, and short lines travel fast."""
    return [as_list(one) for one in values] if values.ndim > 1 else [as_number(one) for one in values.tolist()]


def as_number(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def draw_axis(label: str, scale: str = "linear", low: float | None = None, high: float | None = None) -> dict[str, Any]:
    bounds = {"low": low, "high": high}
    return {"label": label, "scale": scale} | {name: value for name, value in bounds.items() if value is not None}


def draw_chart(title: str, x: Any, y: Any, series: list[Series], notes: list[str], about: str) -> Chart:
    return {"title": title, "x": x, "y": y, "series": series, "notes": notes, "about": about}


def draw_line(name: str, role: str, x: Tensor, y: Tensor) -> Series:
    return {"kind": "line", "name": name, "role": role, "x": as_list(x), "y": as_list(y)}


def draw_band(name: str, role: str, x: Tensor, low: Tensor, high: Tensor) -> Series:
    return {"kind": "band", "name": name, "role": role, "x": as_list(x), "low": as_list(low), "high": as_list(high)}


def draw_paths(name: str, role: str, x: Tensor, ys: Tensor) -> Series:
    return {"kind": "paths", "name": name, "role": role, "x": as_list(x), "ys": as_list(ys)}


def draw_rule(name: str, **place: float) -> Series:
    return {"kind": "rule", "name": name, "role": "bound"} | place


def draw_spread(name: str, role: str, x: Tensor, values: Tensor, band: bool = True) -> list[Series]:
    """The median over samples, [time, sample], and the band from 5 to 95 %. Samples that are nan are left out."""
    low, middle, high = values.double().nanquantile(torch.tensor(BAND, dtype=torch.float64), dim=-1)
    bands = [draw_band(f"{name}, 5 to 95 %", role, x, low, high)] if band else []
    return [*bands, draw_line(f"{name}, median", role, x, middle)]
