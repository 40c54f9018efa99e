"""What a run trains. A new objective is a module with an `OBJECTIVE` and a line in OBJECTIVES.

Settings take their choices from OBJECTIVES. The objectives' modules import transformers, so they are loaded by name when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from shaped.train.data.batches import Batches
from shaped.train.data.prepared import Data


@dataclass(frozen=True)
class Objective:
    """A model class, its batches, its loss and its metrics."""

    model: Any
    """A class of `shaped.hf`, made from a `ShapedConfig`."""
    batches: Callable[..., Batches]
    """Called with the data, its part ("train" or "valid"), the settings, and the arguments of `Batches`."""
    loss: Any
    """A `Loss` class (`shaped.train.step.objectives.losses`), made from a model; takes a batch."""
    metrics: Callable[[float, Data, Any], dict[str, float]]
    """What a test line of metrics.jsonl says, from the mean loss, the data and the settings: "loss", the mean loss itself, and what else
    follows from it."""
    inputs: Callable[[tuple[Tensor, ...]], dict[str, Any]]
    """The model's arguments for a batch beside its tokens, to observe the layers."""
    weigh: Callable[[tuple[Tensor, ...]], Tensor | float] = lambda batch: 1.0
    """How much a batch counts in the mean loss over a text, the same in every process: all alike where they have as many labels."""


@dataclass(frozen=True)
class Entry:
    """An objective that is not loaded yet."""

    module: str
    about: str
    """A few words for the command's help."""


OBJECTIVES = {
    "masked": Entry("shaped.train.step.objectives.masked_lm", "masked language modelling"),
    "causal": Entry("shaped.train.step.objectives.causal_lm", "prediction of the next token"),
}


def load_objective(name: str) -> Objective:
    return import_module(OBJECTIVES[name].module).OBJECTIVE
