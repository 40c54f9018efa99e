"""`shaped.watch` in loops as people write them: scaled losses, validations, errors that are caught, copies, compilers, processes."""

import copy
import io
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

import shaped
from refusals import refused
from shaped.watching.trainer import WatchCallback
from watching.test_watcher import IDS, compute_loss, make_model


def watch_once(model: nn.Module, factor: float = 1.0, **how: Any) -> shaped.Watcher:
    with shaped.watch(model) as watcher:
        loss = compute_loss(model)
        (factor * loss).backward()
        watcher.step(loss, **how)
    return watcher


def test_a_scaled_loss_has_the_gradients_of_one_that_is_not(tmp_path: Path):
    plain = watch_once(make_model()).rows[0].quantities["gradient"]
    assert watch_once(make_model(), 1024.0, scale=1024.0).rows[0].quantities["gradient"] == pytest.approx(plain, rel=1e-5)
    skipped = watch_once(make_model(), math.inf, scale=65536.0)  # the scaler takes no such step
    assert not skipped.alarms
    assert all(math.isnan(value) for value in skipped.rows[0].quantities["gradient"].values())
    arguments, state, control = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]), TrainerState(), TrainerControl()
    model, callback, optimizer = make_model(), WatchCallback(), SimpleNamespace(scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    callback.on_train_begin(arguments, state, control, model=model)
    (1024.0 * compute_loss(model)).backward()
    callback.on_pre_optimizer_step(arguments, state, control, model=model, optimizer=optimizer)
    callback.on_train_end(arguments, state, control)
    assert callback.watcher is not None
    assert callback.watcher.rows[0].quantities["gradient"] == pytest.approx(plain, rel=1e-5)
    with refused("scale", "0"):
        watch_once(make_model(), scale=0.0)


def test_a_validation_with_gradients_and_a_pass_that_failed_do_not_count():
    model = make_model()
    with shaped.watch(model) as watcher:
        model.eval()
        compute_loss(model, IDS[:1])
        model.train()
        broken = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compute_loss(model, IDS[:1])
        broken.remove()
        compute_loss(model).backward()
        watcher.step(None)
    assert watcher.rows[0].quantities == watch_once(make_model()).rows[0].quantities


def test_one_gradient_that_is_nan_is_an_alarm_though_the_loss_is_finite():
    model: Any = make_model()
    model.layers[1].linear1.weight.register_hook(lambda gradient: gradient * math.nan)
    model.layers[0].requires_grad_(False)  # has no gradient, which is no alarm
    (alarm,) = watch_once(model).alarms
    assert (alarm.kind, alarm.layer) == ("non-finite values", "layers.1")


def test_a_stream_that_is_nan_is_an_alarm_though_the_loss_is_not_known():
    model: Any = make_model()
    nn.init.constant_(model.layers[1].linear2.bias, math.nan)
    with shaped.watch(model) as watcher:
        compute_loss(model).backward()
        (alarm,) = watcher.step(None)
    assert (alarm.kind, alarm.layer) == ("non-finite values", "layers.1")


def test_a_loss_that_is_changed_in_place_later():
    model = make_model()
    with shaped.watch(model, every=2) as watcher:
        for _ in range(3):
            loss = compute_loss(model)
            loss.backward()
            watcher.step(loss)
            loss.detach().zero_()
    assert watcher.rows[1].loss == pytest.approx(watcher.rows[0].loss)


def test_an_optimiser_in_the_backward_pass():
    """It updates each weight as soon as its gradient is there, and frees the gradient."""

    def update(parameter: torch.Tensor) -> None:
        seen.append(parameter)
        parameter.grad = None

    seen: list[torch.Tensor] = []
    model = make_model()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    assert watch_once(model).rows[0].quantities == watch_once(make_model()).rows[0].quantities
    assert len(seen) == len([*model.parameters()])
    assert all(len(parameter._post_accumulate_grad_hooks or ()) == 1 for parameter in model.parameters())


def test_sparse_gradients():
    model = make_model()
    model.embedding = nn.Embedding(20, 16, sparse=True)
    assert watch_once(model).rows


def test_copies_of_a_watched_model_are_not_watched():
    model = make_model()
    with shaped.watch(model) as watcher:
        copied = copy.deepcopy(model)
        compute_loss(copied)
        torch.save(model, io.BytesIO())
        with refused("model", "no call"):
            watcher.step(None)


def test_two_watched_models_leave_the_compiler_as_it_was():
    calls: list[int] = []

    def count(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph(*args)

        return run

    add = torch.compile(lambda x: x + 1.0, backend=count)
    one, other = make_model(), make_model()
    with shaped.watch(one, every=9) as first, shaped.watch(other, every=9) as second:
        add(torch.zeros(2))
        assert not calls
        for model, watcher in ((one, first), (other, second)):
            compute_loss(model).backward()
            watcher.step(None)
        add(torch.zeros(2))
    assert calls == [1]


def test_processes_that_train_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Only the first one writes, and none stops alone."""
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    shaped.watch(make_model(), out=tmp_path / "watch")
    assert not (tmp_path / "watch").exists()
    with refused("stop", "2 processes"):
        shaped.watch(make_model(), stop=True)


def test_a_step_outside_of_the_watch_is_refused():
    with refused("watch", "with shaped.watch"):
        shaped.watch(make_model()).step(1.0)
