"""Diagnostics of gradients in half precision, where the loss is multiplied by a scale."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_trainer import model_of
from transformers import TrainerControl, TrainerState, TrainingArguments

from shaped.hf import DiagnosticsCallback


@pytest.mark.parametrize(("clip", "scale"), [(0.0, 1024.0), (1.0, 1.0)])
def test_gradients_are_those_that_the_optimiser_gets(clip, scale, tmp_path):
    """Where the Trainer clips, the scale is out of them already."""
    model, ids = model_of("fixed"), torch.arange(2, 14)[None]
    arguments = TrainingArguments(output_dir=str(tmp_path), max_grad_norm=clip, use_cpu=True, report_to=[])
    callback, given = DiagnosticsCallback(every=1), (arguments, TrainerState(), TrainerControl())
    rows = []
    for factor, optimiser in ((1.0, None), (scale, SimpleNamespace(scaler=SimpleNamespace(get_scale=lambda: 1024.0)))):
        parts: dict[str, Any] = {"model": model, "optimizer": optimiser}
        model.zero_grad()
        callback.on_step_begin(*given, **parts)
        (factor * model(ids, labels=ids).loss).backward()
        callback.on_pre_optimizer_step(*given, **parts)
        rows.append(callback.history[-1]["gradient_norm"])
    assert rows[1] == pytest.approx(rows[0], rel=1e-5)
