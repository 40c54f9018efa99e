"""For `transformers.Trainer`: the schedules of the shaping, and a log of entropy, token correlation and gradient norms by layer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shaped.checks import whole_number
from shaped.files import write_atomically
from shaped.hf import attention
from shaped.hf.shaping import shaped_attentions
from shaped.nn.diagnostics import attention_entropy, token_correlation
from shaped.nn.schedules import Schedule


class ShapingCallback(TrainerCallback):
    """Takes the shaping of a model where its schedule wants it: `ShapingCallback(Recover(4000))`. Resumed runs go on where they were."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.schedule.apply(kwargs["model"], state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # At the end of a step, so that what is evaluated or saved after it has the shaping of its own step.
        self.schedule.apply(kwargs["model"], state.global_step)


class DiagnosticsCallback(TrainerCallback):
    """Every so many steps, for each layer: entropy of the attention, correlation of the tokens, norm of the gradient, gamma1 and gamma2.

    A row a time is added to `history` and to diagnostics.jsonl in the output directory. Gradients are those that the optimiser gets: if the
    Trainer clips them (it does by default, at `max_grad_norm=1`), clipped.

    Args:
        every: steps between two rows.
        sequences: of the batch, how many to look at for entropy and correlation.
    """

    def __init__(self, every: int = 100, sequences: int = 4):
        self.every, self.sequences = whole_number("every", every), whole_number("sequences", sequences)
        self.history: list[dict[str, Any]] = []
        self._row: dict[str, Any] | None = None
        self._hooks: list[Any] = []

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """What a resumed run will do again is forgotten."""
        path = self._path(args)
        if path.exists():
            self.history = [row for row in _rows(path) if row["step"] < state.global_step]
            if state.is_world_process_zero:
                kept = "".join(json.dumps(row) + "\n" for row in self.history)
                write_atomically(path, lambda file: file.write(kept.encode()))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._watch(kwargs["model"], state.global_step)

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._row is None:
            return
        self._stop_watching()
        self._row["gradient_norm"] = gradient_norms(kwargs["model"])
        self.history.append(self._row)
        if state.is_world_process_zero:
            path = self._path(args)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(self._row) + "\n")
        self._row = None

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._stop_watching()

    def _watch(self, model: nn.Module, step: int) -> None:
        attentions = shaped_attentions(model)
        names = {id(module): layer_of(name) for name, module in attentions.items()}
        gains = {name: [gain.item() for gain in module.shaping.scalars()] for name, module in attentions.items()}  # pyright: ignore
        row: dict[str, Any] = {"step": step, "entropy": {}, "correlation": {}}
        row["gamma1"], row["gamma2"] = ({layer_of(name): values[i] for name, values in gains.items()} for i in range(2))
        few, padding = slice(self.sequences), {}

        def remember_padding(module: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
            mask = named.get("attention_mask")
            padding["real"] = mask[few] if isinstance(mask, Tensor) and mask.ndim == 2 else None

        def entropy(module: nn.Module, q: Tensor, k: Tensor, scale: float, mask: Tensor | None, causal: bool) -> None:
            name = names.get(id(module))
            if name is not None and name not in row["entropy"]:
                mask = mask if mask is None or mask.shape[0] == 1 else mask[few]
                with torch.no_grad():
                    entropies = attention_entropy(q[few], k[few], scale=scale, is_causal=causal, attn_mask=mask).mean(-2)
                row["entropy"][name] = (entropies if padding["real"] is None else entropies[padding["real"].bool()]).mean().item()

        def correlation(name: str) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                if name not in row["correlation"]:
                    tokens = output[0] if isinstance(output, tuple) else output
                    row["correlation"][name] = token_correlation(tokens[few].detach(), padding["real"]).nanmean().item()

            return hook

        attention.observers.append(entropy)
        self._hooks.append(lambda: attention.observers.remove(entropy))
        self._hooks.append(model.register_forward_pre_hook(remember_padding, with_kwargs=True).remove)
        modules = dict(model.named_modules())
        for name in dict.fromkeys(names.values()):
            self._hooks.append(modules[name].register_forward_hook(correlation(name)).remove)
        self._row = row

    def _stop_watching(self) -> None:
        for remove in self._hooks:
            remove()
        self._hooks = []

    @staticmethod
    def _path(args: TrainingArguments) -> Path:
        return Path(args.output_dir or ".") / "diagnostics.jsonl"


def layer_of(name: str) -> str:
    """The layer that a module stands in: bert.encoder.layer.3.attention.self is in bert.encoder.layer.3."""
    found = re.match(r".*?(?:^|\.)\d+(?=\.|$)", name)
    return found.group() if found else name


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """The norm of the gradient of each layer that has shaped attention."""
    layers = dict.fromkeys(layer_of(name) for name in shaped_attentions(model))
    modules = dict(model.named_modules())

    def norm(layer: nn.Module) -> float:
        gradients = [parameter.grad.detach().float() for parameter in layer.parameters() if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).item()

    return {name: norm(modules[name]) for name in layers}


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of the file, without a last one that was cut off."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
