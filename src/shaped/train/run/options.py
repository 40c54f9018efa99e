"""Fields of settings: each says once its default, its values, its topic and what it affects. Options, pages and checks come from that."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping
from dataclasses import Field, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from shaped.checks import finite, in_range, positive, whole_number

MOST = (1 << 63) - 1  # more fits into no tensor
FLOAT32 = float(torch.finfo(torch.float32).max)

TOPICS = {
    "data": "Data and output",
    "model": "Model",
    "optimisation": "Optimisation",
    "hardware": "Hardware",
    "logging": "Logging and checkpoints",
}
AFFECTS = {
    "result": "what is computed; a run cannot go on with another value",
    "speed": "how fast a run is; the result changes in its rounding at most",
    "logging": "what is measured and kept on the way",
    "place": "where one command works, and for how long; no part of the run's record",
}
Affects = Literal["result", "speed", "logging", "place"]


def option(
    default: Any,
    help: str,
    *,
    topic: str,
    affects: Affects = "result",
    used_by: str = "",
    choices: tuple[str, ...] = (),
    least: int | None = None,
    most: int = MOST,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A field of settings.

    Args:
        topic: a key of TOPICS.
        affects: a key of AFFECTS.
        used_by: the part of a model that makes use of it ("gains", "shaping", "norms", "dyt", "rope", or a schedule), or the
            objective; empty if all do.
        choices, least, most, low, high: its values: one of `choices`, a whole number in [least, most], a number in [low, high].
    """
    rules = {"choices": choices, "least": least, "most": most, "low": low, "high": high}
    return field(default=default, metadata={"help": help, "topic": topic, "affects": affects, "used_by": used_by, **rules})


def describe(registry: Mapping[str, Any]) -> str:
    """The entries of a registry, each with its `about`, for a help text."""
    return "; ".join(f"{name}: {entry.about}" for name, entry in registry.items()) + "."


def without_none(kind: Any) -> Any:
    """The type of a setting where it is given: int of `int | None`."""
    return next(part for part in typing.get_args(kind) if part is not type(None)) if isinstance(kind, types.UnionType) else kind


read_hints = cache(typing.get_type_hints)  # evaluates every annotation anew: ten milliseconds for the settings of a run


def check(settings: Any) -> None:
    """Refuses settings of a class made of `option` whose values are not what their types and rules say."""
    hints = read_hints(type(settings))
    for about in fields(settings):
        _check(about, getattr(settings, about.name), hints[about.name])


def _check(about: Field[Any], value: Any, kind: Any) -> None:
    """What the field's type and metadata say; None only where the type has it."""
    name, rules = about.name, about.metadata
    if value is None and isinstance(kind, types.UnionType):
        return
    kind = without_none(kind)
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    if kind is int:
        whole_number(name, value, least=rules["least"], most=rules["most"])
    if kind is float and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if kind is float:
        number = finite(name, value) if rules["low"] != 1e-6 else positive(name, value)
        if abs(number) > FLOAT32:  # it would become inf in training
            raise ValueError(f"{name} must be finite in float32, got {value}")
        if rules["low"] is not None and number < rules["low"]:
            raise ValueError(f"{name} must be at least {rules['low']:g}, got {value}")
        low, high = rules["low"], rules["high"]
        if low is not None and high is not None:
            in_range(name, number, low, high)
    if kind in (str, Path) and not isinstance(value, str | Path):
        raise ValueError(f"{name} must be a text, got {value!r}")
    if kind is Path and (not str(value) or re.search(r"[\0\ud800-\udfff]", str(value))):  # surrogates: bytes that are not UTF-8
        raise ValueError(f"{name} must be a path, got {str(value)!r}")
    if rules["choices"] and value not in rules["choices"]:
        raise ValueError(f"{name} must be one of {', '.join(rules['choices'])}, got {value!r}")
