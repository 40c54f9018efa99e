"""What is seen of a run at one step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shaped.diagnosis.curves import CURVES, list_curves
from shaped.diagnosis.observation import StackObservation
from shaped.files import check_entries, replace_non_finite


@dataclass(frozen=True)
class Row:
    """What was measured at one step of a training run."""

    step: int
    """Counted from 0: how many updates the weights had."""
    loss: float | None
    """Mean over the steps since the row before; None where it is not known."""
    quantities: dict[str, dict[str, float]]
    """Quantity → layer → number: those of `shaped.diagnose`, behind each layer. nan where a layer has none; a
    stream or a gradient that is not finite is inf."""

    @classmethod
    def of(cls, step: int, loss: float | None, stacks: tuple[StackObservation, ...]) -> Row:
        """From the layers that were observed during the step."""
        found: dict[str, dict[str, float]] = {name: {} for name in CURVES}
        for stack in stacks:
            for name, values in list_curves(stack).items():
                behind = values[len(values) - len(stack.layers) :]  # curves of the tokens also have what enters the first layer
                found[name] |= {layer.name: value for layer, value in zip(stack.layers, behind, strict=True)}
            for layer in stack.layers:
                for name, was_measured in (("length", layer.tokens.tokens > 0), ("gradient", bool(layer.gradients))):
                    if was_measured and math.isnan(found[name][layer.name]):
                        found[name][layer.name] = math.inf
        return cls(step, loss, found)

    def to_json(self) -> dict[str, Any]:
        """A number that is not finite is None."""
        layers = {name: {layer: replace_non_finite(value) for layer, value in values.items()} for name, values in self.quantities.items()}
        return {"step": self.step} | ({} if self.loss is None else {"loss": replace_non_finite(self.loss)}) | layers

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Row:
        """From what `to_json` made."""
        check_entries("a row", line, step=int)
        layers = {name: values for name, values in line.items() if isinstance(values, dict)}
        numbers = {name: {layer: none_to_nan(value) for layer, value in values.items()} for name, values in layers.items()}
        return cls(line["step"], none_to_nan(line["loss"]) if "loss" in line else None, numbers)


def none_to_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)
