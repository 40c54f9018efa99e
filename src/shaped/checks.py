"""Checks of arguments: a ValueError in one line, with the argument's name, what would be right, and what it got."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

HUGE = 1e100  # squares of larger numbers overflow
LARGEST = 2**53  # floats represent every whole number up to this exactly
SINGLE = 1e30  # its product with a large feature still fits into float32


def quote(value: Any) -> str:
    """What an error says that it got, in one line of at most 200 characters: arrays, modules and the like have a repr of many lines.

    A large array is told by its shape.
    """
    text = " ".join(repr(value).split())
    if len(text) > 80 and isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} of shape {list(value.shape)}"
    return text if len(text) <= 200 else f"{text[:199]}…"


def whole_number(name: str, value: Any, least: int = 1, most: float = LARGEST) -> int:
    """The value as an int in [least, most]. Booleans are not numbers here."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {quote(value)}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if number > most:
        got = number if number.bit_length() <= 128 else f"one of {number.bit_length()} bits"
        raise ValueError(f"{name} must be at most {most}, got {got}")
    return number


def keep(record: Any, check: Callable[..., Any], *names: str, **bounds: float) -> None:
    """Checks fields of a frozen dataclass, and keeps the Python number that the check returns in place of what was given.

    Squares of numpy's small integers overflow, and a Parameter brings its graph along. None stays where it is the field's default.
    """
    for name in names:
        value, default = getattr(record, name), getattr(type(record), name, "there is none")
        if value is not None or default is not None:
            object.__setattr__(record, name, check(name, value, **bounds))


def fold_seed(seed: int) -> int:
    """A seed of any size as one that torch takes: those below 2^63 as they are."""
    return seed % 2**63


def parse_whole_numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} must be whole numbers separated by commas, got {text!r}") from None


def check_bool(name: str, value: Any) -> bool:
    """The value, if it is True or False. Other values that Python takes for booleans, such as 0, are refused."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {quote(value)}")
    return bool(value)


def in_range(name: str, value: Any, low: float, high: float) -> float:
    """The value as a float in [low, high]."""
    number = _to_float(name, value)
    if not low <= number <= high:
        raise ValueError(f"{name} must lie in [{low:g}, {high:g}], got {value}")
    return number


def positive(name: str, value: Any, most: float = HUGE) -> float:
    """The value as a float in [1/most, most]."""
    number = _to_float(name, value)
    if not 1.0 / most <= number <= most:
        raise ValueError(f"{name} must be positive and finite{_describe_range(number, f'in [{1.0 / most:g}, {most:g}]')}, got {value}")
    return number


def finite(name: str, value: Any, most: float = HUGE) -> float:
    """The value as a float in [-most, most]."""
    number = _to_float(name, value)
    if not abs(number) <= most:
        raise ValueError(f"{name} must be finite{_describe_range(number, f'in [{-most:g}, {most:g}]')}, got {value}")
    return number


def _describe_range(number: float, bounds: str) -> str:
    """The bounds as text, for the error about a finite number that is out of bounds; empty for 0, inf and nan."""
    return f" and {bounds}" if 0.0 < abs(number) < float("inf") else ""


def check_slope(name: str, value: Any) -> float:
    """The value as a float whose square fits into float32."""
    return in_range(name, value, -1e18, 1e18)


def _to_float(name: str, value: Any) -> float:
    """The value as a float. Booleans are not numbers here: True for `upper` would stop every path at 1."""
    try:
        if isinstance(value, str | bytes | bool | np.bool_) or (isinstance(value, Tensor) and value.dtype == torch.bool):
            raise TypeError
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {quote(value)}") from None


def as_tensor(name: str, value: Any) -> Tensor:
    """A tensor as it is; an array or lists of numbers as a tensor."""
    if isinstance(value, Tensor):
        return value
    try:
        array = np.array(value)  # a copy: torch refuses views with negative strides and read-only arrays
        return torch.from_numpy(array.astype(np.float64) if array.dtype == np.longdouble else array)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be numbers in the shape of a matrix, got {quote(value)}") from None


def check_device(device: Any) -> torch.device:
    """The device, if torch can compute and draw random numbers on it.

    torch raises different errors for an unknown name, a kind it was not built for, a missing device and a missing generator.
    """
    try:
        where = torch.device(device)
        torch.zeros(1, device=where).item()
        torch.Generator(where)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError):
        raise ValueError(f"device must be one that torch can use here, such as 'cpu' or 'cuda', got {str(device)!r}") from None
    return where
