"""Callbacks for `transformers.Trainer`: schedules of the shaping, and a log of the diagnostic quantities of every layer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shaped.checks import whole_number
from shaped.files import append_lines, read_steps, replace_non_finite, write_lines
from shaped.hf import attention
from shaped.hf.configuration import ShapedConfig
from shaped.hf.observation import QuantityRecorder, find_layers
from shaped.nn.diagnostics import QUANTITIES, Source, measure
from shaped.nn.schedules import Schedule, Shapeable, check_schedule


class ShapingCallback(TrainerCallback):
    """Applies a schedule to the shaping of a model, every step: `ShapingCallback(Recover(4000))`. A resumed run continues the schedule.

    A run that starts anew starts the schedule anew. If the model had less shaping, as one that was trained with Recover has, a warning says
    so: it is then another function. Such a model is fine-tuned without this callback.
    """

    def __init__(self, schedule: Schedule):
        self.schedule = check_schedule(schedule)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        before = list_shaping(kwargs["model"])
        self.schedule.apply(kwargs["model"], state.global_step)
        changed = [pair for pair in zip(before, list_shaping(kwargs["model"]), strict=True) if differ(*pair)]
        if changed and state.global_step == 0:
            warnings.warn(
                f"{self.schedule!r} starts anew, and the shaping of a model that had gains of {changed[0][0]:.3g} is set to "
                f"{changed[0][1]:.3g}: the model is then another function; leave ShapingCallback out to keep its gains, or resume its run",
                stacklevel=2,
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # At the end of a step: a model that is evaluated or saved then has the shaping of that step.
        self.schedule.apply(kwargs["model"], state.global_step)


def list_shaping(model: nn.Module) -> list[float]:
    """Every number that shapes the model."""
    found = (scalar.detach().flatten() for module in model.modules() if isinstance(module, Shapeable) for scalar in module.scalars())
    return [gain for scalar in found for gain in scalar.tolist()]


def differ(before: float, after: float) -> bool:
    """By more than the rounding of half precision."""
    return abs(before - after) > 0.01 * abs(after)


class LayerLogCallback(TrainerCallback):
    """A callback that logs numbers of every layer: {"step": step, quantity: {layer: number}}."""

    def __init__(self):
        self.beside: list[TrainerCallback] = []
        """All callbacks of the Trainer, this one among them; `extensions` sets it."""

    def log_row(self, row: dict[str, Any], args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Does what `Trainer.log` does, which no callback can call, but leaves out the console: a row is too long for it."""
        of_layers = {name: values for name, values in row.items() if isinstance(values, dict)}
        logs = {f"{name}/{layer}": value for name, values in of_layers.items() for layer, value in values.items() if value is not None}
        logs |= {} if state.epoch is None else {"epoch": state.epoch}
        state.log_history.append({**logs, "step": state.global_step})
        for callback in self.beside:
            if not isinstance(callback, LayerLogCallback | PrinterCallback | ProgressCallback):
                callback.on_log(args, state, control, logs=dict(logs), **kwargs)


class DiagnosticsCallback(LayerLogCallback):
    """Measures every layer, every so many steps: entropy of the attention, correlation of the tokens, norm of the gradient, gamma1, gamma2
    and whatever else is in `shaped.nn.diagnostics`.

    Each time one row is added to `history` and to diagnostics.jsonl in the output directory. The row is also logged as Trainer logs a
    loss: to everything in `report_to` (TensorBoard...) and to `state.log_history`, one number under each of "entropy/LAYER",
    "gamma1/LAYER" and so on. Numbers that are not finite are left out, and the console gets none. Gradients are those that the optimiser
    gets: clipped, if the Trainer clips them (it does by default, at `max_grad_norm=1`).

    Args:
        every: steps between two rows.
        sequences: how many sequences of the batch are measured for entropy and correlation.
    """

    def __init__(self, every: int = 100, sequences: int = 4):
        super().__init__()
        self.every, self.sequences = whole_number("every", every), whole_number("sequences", sequences)
        self.history: list[dict[str, Any]] = []
        self._recorder: QuantityRecorder | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Drops the rows of steps that a resumed run will do again."""
        self._stop_recording()
        if not find_layers(kwargs["model"]):
            raise ValueError(f"model must have self-attention by the attention interface, got {type(kwargs['model']).__name__}")
        config = getattr(kwargs["model"], "config", None)
        implementation = getattr(config, "_attn_implementation", attention.NAME)
        eager = implementation == "eager" and isinstance(config, ShapedConfig)  # "eager" is shaped attention too, in our own models
        if implementation != attention.NAME and not eager:
            raise ValueError(f"model must have attn_implementation='{attention.NAME}' for its attention to be seen, got {implementation!r}")
        path = self._path(args)
        self.history = [row for row in read_steps(path) if row["step"] < state.global_step]
        if path.exists() and state.is_world_process_zero:
            write_lines(path, self.history)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._stop_recording()
        if state.global_step % self.every == 0:
            self._recorder = QuantityRecorder(kwargs["model"], self.sequences)

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._recorder is None:
            return
        scaler = getattr(kwargs.get("optimizer"), "scaler", None)  # accelerate's, in half precision; clipping has divided by its scale
        scale = scaler.get_scale() if scaler is not None and args.max_grad_norm <= 0 else 1.0
        row = self._row(self._recorder, state.global_step, scale)
        self._stop_recording()
        self.history.append(row)
        self.log_row(row, args, state, control, **kwargs)
        if state.is_world_process_zero:
            path = self._path(args)
            path.parent.mkdir(parents=True, exist_ok=True)
            append_lines(path, [row])

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._stop_recording()

    def _row(self, recorder: QuantityRecorder, step: int, scale: float) -> dict[str, Any]:
        """{"step": step, quantity: {layer: number}}; a number that is not finite is None, as JSON has it. Gradients have this scale."""
        row: dict[str, Any] = {known.name: {} for known in QUANTITIES.values() if known.source is not Source.GAINS}
        for name, (layer, module) in recorder.layers.items():
            gradients = [parameter.grad.detach() / scale for parameter in layer.parameters() if parameter.grad is not None]
            gains = dict(zip(("gamma1", "gamma2"), attention.read_gains(module), strict=True))
            values = recorder.values[name] | measure(Source.GRADIENTS, gradients) | measure(Source.GAINS, gains)
            for quantity, value in values.items():
                row.setdefault(quantity, {})[name] = replace_non_finite(value)
        return {"step": step} | row

    def _stop_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        self._recorder = None

    @staticmethod
    def _path(args: TrainingArguments) -> Path:
        return Path(args.output_dir or ".") / "diagnostics.jsonl"
