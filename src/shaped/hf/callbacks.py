"""For `transformers.Trainer`: the schedules of the shaping, and a log of entropy, token correlation and gradient norms by layer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shaped.checks import whole_number
from shaped.files import write_atomically
from shaped.hf import attention
from shaped.hf.configuration import ShapedConfig
from shaped.nn.diagnostics import attention_entropy, token_correlation
from shaped.nn.schedules import Schedule, check_schedule


class ShapingCallback(TrainerCallback):
    """Takes the shaping of a model where its schedule wants it: `ShapingCallback(Recover(4000))`. Resumed runs go on where they were."""

    def __init__(self, schedule: Schedule):
        self.schedule = check_schedule(schedule)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.schedule.apply(kwargs["model"], state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # At the end of a step, so that what is evaluated or saved after it has the shaping of its own step.
        self.schedule.apply(kwargs["model"], state.global_step)


class DiagnosticsCallback(TrainerCallback):
    """Every so many steps, for each layer: entropy of the attention, correlation of the tokens, norm of the gradient, gamma1 and gamma2.

    A row a time is added to `history` and to diagnostics.jsonl in the output directory. It is also logged as Trainer logs a loss, to
    whatever `report_to` names (TensorBoard...) and to `state.log_history`, a number each under "entropy/LAYER", "gamma1/LAYER" and so on;
    not to the console, and without what is not finite. Gradients are those that the optimiser gets: if the Trainer clips them (it does by
    default, at `max_grad_norm=1`), clipped.

    Args:
        every: steps between two rows.
        sequences: of the batch, how many to look at for entropy and correlation.
    """

    def __init__(self, every: int = 100, sequences: int = 4):
        self.every, self.sequences = whole_number("every", every), whole_number("sequences", sequences)
        self.history: list[dict[str, Any]] = []
        self.beside: list[TrainerCallback] = []
        """The callbacks of the Trainer that has this one."""
        self._row: dict[str, Any] | None = None
        self._hooks: list[Any] = []

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """What a resumed run will do again is forgotten."""
        self._stop_watching()
        if not layers(kwargs["model"]):
            raise ValueError(f"model must have self-attention by the attention interface, got {type(kwargs['model']).__name__}")
        config = getattr(kwargs["model"], "config", None)
        chosen = getattr(config, "_attn_implementation", attention.NAME)
        if chosen != attention.NAME and not (chosen == "eager" and isinstance(config, ShapedConfig)):  # there it is the same attention
            raise ValueError(f"model must have attn_implementation='{attention.NAME}' for its attention to be seen, got {chosen!r}")
        path = self._path(args)
        self.history = [row for row in _rows(path) if row["step"] < state.global_step] if path.exists() else []
        if path.exists() and state.is_world_process_zero:
            kept = "".join(json.dumps(row) + "\n" for row in self.history)
            write_atomically(path, lambda file: file.write(kept.encode()))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._stop_watching()
        if state.global_step % self.every == 0:
            self._watch(kwargs["model"], state.global_step)

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._row is None:
            return
        row = self._row | {"gradient_norm": {name: gradient_norm(layer) for name, (layer, _) in layers(kwargs["model"]).items()}}
        self._stop_watching()
        self.history.append(row)
        self._log(row, args, state, control, **kwargs)
        if state.is_world_process_zero:
            path = self._path(args)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._stop_watching()

    def _log(self, row: dict[str, Any], args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """As `Trainer.log` does, which no callback can call. A line with a number for each layer is nothing for a console."""
        of_layers = {name: values for name, values in row.items() if isinstance(values, dict)}
        logs = {f"{name}/{layer}": value for name, values in of_layers.items() for layer, value in values.items() if value is not None}
        logs |= {} if state.epoch is None else {"epoch": state.epoch}
        state.log_history.append({**logs, "step": state.global_step})
        for callback in self.beside:
            if not isinstance(callback, DiagnosticsCallback | PrinterCallback | ProgressCallback):
                callback.on_log(args, state, control, logs=dict(logs), **kwargs)

    def _watch(self, model: nn.Module, step: int) -> None:
        """Hooks for one step; `_stop_watching` takes them away."""
        found = layers(model)
        names = {id(module): name for name, (_, module) in found.items()}
        row: dict[str, Any] = {"step": step, "entropy": {}, "correlation": {}}
        for i, gamma in enumerate(("gamma1", "gamma2")):
            row[gamma] = {name: _number(torch.as_tensor(attention.gains_of(module)[i])) for name, (_, module) in found.items()}
        few, padding = slice(self.sequences), {}

        def remember_padding(module: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
            padding.update({name: named.get(name) for name in ("attention_mask", "decoder_attention_mask")})

        def real(name: str, batch: int, m: int) -> Tensor:
            """Which tokens are not padding, as far as the model was told."""
            mask = padding.get("decoder_attention_mask" if "decoder" in name.split(".") else "attention_mask")
            if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[0] >= batch and mask.shape[1] == m:
                return mask[:batch].bool()
            return torch.ones(batch, m, dtype=torch.bool)

        def entropy(module: nn.Module, q: Tensor, k: Tensor, scale: float, mask: Tensor | None, causal: bool) -> None:
            name = names.get(id(module))
            if name is not None and name not in row["entropy"]:
                mask = mask if mask is None or mask.shape[0] == 1 else mask[few]
                with torch.no_grad():
                    entropies = attention_entropy(q[few], k[few], scale=scale, is_causal=causal, attn_mask=mask).mean(-2)
                row["entropy"][name] = _number(entropies[real(name, *entropies.shape).to(q.device)].mean())

        def correlation(name: str) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                tokens = output[0] if isinstance(output, tuple) else output
                if name not in row["correlation"] and isinstance(tokens, Tensor) and tokens.ndim == 3:
                    tokens = tokens[few].detach()
                    row["correlation"][name] = _number(token_correlation(tokens, real(name, *tokens.shape[:2]).to(tokens.device)).nanmean())

            return hook

        attention.observers.append(entropy)
        self._hooks.append(lambda: attention.observers.remove(entropy))
        self._hooks.append(model.register_forward_pre_hook(remember_padding, with_kwargs=True).remove)
        for name, (layer, _) in found.items():
            self._hooks.append(layer.register_forward_hook(correlation(name)).remove)
        self._row = row

    def _stop_watching(self) -> None:
        for remove in self._hooks:
            remove()
        self._hooks, self._row = [], None

    @staticmethod
    def _path(args: TrainingArguments) -> Path:
        return Path(args.output_dir or ".") / "diagnostics.jsonl"


def layers(model: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """The layers of a model, by name: the largest numbered part around each self-attention that has no other in it; and that attention."""
    modules, attentions = dict(model.named_modules()), attention.self_attentions(model)

    def layer_of(name: str) -> str:
        for end in (match.end() for match in re.finditer(r"(?:^|\.)\d+(?=\.|$)", name)):
            if sum(other.startswith(name[:end] + ".") for other in attentions) == 1:
                return name[:end]
        return name

    return {layer_of(name): (modules[layer_of(name)], module) for name, module in attentions.items()}


def gradient_norm(layer: nn.Module) -> float | None:
    gradients = [parameter.grad.detach().float() for parameter in layer.parameters() if parameter.grad is not None]
    return _number(torch.nn.utils.get_total_norm(gradients))


def _number(value: Tensor) -> float | None:
    """As JSON has them: what is not finite is null."""
    return value.item() if value.isfinite() else None


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of the file, without a last one that was cut off."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
