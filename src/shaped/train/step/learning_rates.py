"""Learning rates by step: a linear warm-up, then a decay. A new decay is a function here and a line in DECAYS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Decay:
    about: str
    """A few words for the command's help."""
    rate: Callable[[float, int, int, int], float]
    """The learning rate after the warm-up, from (lr, step, warmup, steps)."""
    falls: bool
    """Does it fall between the warm-up and the last step? The warm-up must then end before the last step."""


def _keep(lr: float, step: int, warmup: int, steps: int) -> float:
    return lr


def _fall_linearly(lr: float, step: int, warmup: int, steps: int) -> float:
    return lr * (steps - step) / (steps - warmup)


DECAYS = {"none": Decay("constant", _keep, falls=False), "linear": Decay("linearly to 0 at the last step", _fall_linearly, falls=True)}


def compute_learning_rate(step: int, *, lr: float, warmup: int, steps: int, decay: str) -> float:
    """The learning rate of a step, counted from 0."""
    if step < warmup:
        return lr * (step + 1) / warmup
    return DECAYS[decay].rate(lr, step, warmup, steps)
