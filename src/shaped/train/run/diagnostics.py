"""What a run looks at while it trains: every diagnostic quantity of every layer, and the place where a loss or a gradient broke."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from shaped.hf.observation import QuantityRecorder
from shaped.nn.diagnostics import QUANTITIES, Source, measure
from shaped.watching.alarms import Alarm, Alarms
from shaped.watching.recording import measure_batch
from shaped.watching.rows import Row, none_to_nan

GAIN_PATHS = {"attention.shaping.gamma1": "gamma1", "attention.shaping.gamma2": "gamma2", "feedforward.slope": "slope"}
"""Where a block has gains under another name than that of their quantity."""


@torch.no_grad()
def observe(model: nn.Module, ids: Tensor, gradients: dict[str, Tensor], **inputs: Any) -> dict[str, list[float]]:
    """Every quantity in `nn.diagnostics`, one number a layer, for a forward pass of these ids and for these gradients, by parameter.

    `inputs` are other arguments of the model. Quantities that no layer has, such as the gains of a Pre-LN model, are left out.
    """
    with QuantityRecorder(model) as seen:
        model(input_ids=ids, **inputs)
    for name, (layer, _) in seen.layers.items():
        of_layer = [gradient for parameter, gradient in gradients.items() if parameter.startswith(name + ".")]
        seen.values[name] |= measure(Source.GRADIENTS, of_layer) | measure(Source.GAINS, read_gains(layer))
    rows = {name: [layer.get(name, math.nan) for layer in seen.values.values()] for name in QUANTITIES}
    return {name: row for name, row in rows.items() if any(name in layer for layer in seen.values.values())}


class RunWatch:
    """`shaped.watch` for a run, whose steps may be one CUDA graph. `lines` are those of its metrics, if it is resumed."""

    def __init__(self, lines: Iterable[dict[str, Any]]):
        self._rules = Alarms(make_row(line) for line in lines if line["kind"] == "watch")

    def look(
        self, step: int, loss: float, model: nn.Module, batch: dict[str, Any], gradients: dict[str, Tensor]
    ) -> tuple[dict[str, Any], list[Alarm]]:
        """The values of a line of the metrics, lists over layers, and the alarms. The pass of the batch takes place before this returns."""
        layers = Row.of(step, loss, measure_batch(model, batch, gradients)).quantities
        values = {"loss": loss} | {name: list(numbers.values()) for name, numbers in layers.items()}
        return values, self._rules.check(make_row({"step": step} | values))


def make_row(line: dict[str, Any]) -> Row:
    """Of a line of the metrics. Layers have numbers from 1 in place of names, as in TensorBoard."""
    lists = {name: values for name, values in line.items() if isinstance(values, list)}
    quantities = {name: {f"layer {i}": none_to_nan(value) for i, value in enumerate(values, 1)} for name, values in lists.items()}
    return Row(line["step"], none_to_nan(line["loss"]), quantities)


def describe_alarm(alarm: Alarm) -> dict[str, Any]:
    """The values of a line of the metrics."""
    known = asdict(alarm)
    return {"alarm": known.pop("kind"), "advice": alarm.advice} | {name: value for name, value in known.items() if name != "step"}


def read_gains(layer: nn.Module) -> dict[str, Tensor]:
    """All numbers of a layer's block by the names of their quantities; most are no gains, and no quantity reads them."""
    block: Any = layer.block
    numbers: dict[str, Tensor] = dict(block.named_parameters()) | dict(block.named_buffers())
    return {GAIN_PATHS.get(path, path): number for path, number in numbers.items()}


def first_non_finite(model: nn.Module, loss: Callable[[], Tensor]) -> str:
    """Where a loss breaks: the first parameter that is not finite, or the first module whose output is not. Computes the loss again."""
    broken = [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]
    if broken:
        return f"the parameters {broken[0]} (and {len(broken) - 1} more) after the step before, whose gradient was not finite"
    places: list[str] = []

    def make_hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not output.isfinite().all():
                places.append(name)

        return hook

    # Inner modules return before outer ones, so the first hook that fires names the smallest module.
    hooks = [module.register_forward_hook(make_hook(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            loss()
    finally:
        for hook in hooks:
            hook.remove()
    return f"the output of {places[0]}" if places else "the loss itself, not any layer's output"


def last_non_finite(model: nn.Module, gradients: dict[str, Tensor]) -> str:
    """Where a gradient breaks although the loss is finite. Backpropagation reaches the last parameters first, so the last one is named."""
    norms = {name: torch.linalg.vector_norm(gradient, dtype=torch.float32) for name, gradient in gradients.items()}
    broken = [name for name, _ in model.named_parameters() if not norms[name].isfinite()]
    if not broken:
        return "another process's rows, or in rounding that does not come again without the compiler"
    return f"that of {broken[-1]} (and {len(broken) - 1} more)"
