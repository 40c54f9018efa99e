"""`shaped pretrain --watch-every`: its lines, an alarm that stops, a run that is resumed, and nothing at all when it is off."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from refusals import refused
from shaped.train.run import loop
from shaped.train.run.diagnostics import describe_alarm
from shaped.train.run.loop import pretrain
from shaped.train.run.metrics import Metrics, read_metrics
from shaped.train.run.settings import Settings
from shaped.train.run.stopping import Alarmed, Stopped
from shaped.watching.alarms import Alarm, Alarms


def test_a_watched_run_writes_lines_and_trains_as_one_that_is_not(tiny: Settings):
    plain = pretrain(replace(tiny, steps=40, warmup=10, out=tiny.out / "plain"))
    watched = pretrain(replace(tiny, steps=40, warmup=10, out=tiny.out / "watched", watch_every=10, tensorboard=True))
    assert (plain.train_loss, plain.test_loss) == (watched.train_loss, watched.test_loss)
    assert not read_metrics(tiny.out / "plain" / "metrics.jsonl", "watch")
    lines = read_metrics(tiny.out / "watched" / "metrics.jsonl", "watch")
    train = {line["step"]: line["loss"] for line in read_metrics(tiny.out / "watched" / "metrics.jsonl", "train")}
    assert [line["step"] for line in lines] == [10, 20, 30, 40]
    assert (lines[0]["loss"] + lines[1]["loss"]) / 2 == pytest.approx(train[20])
    layers = read_metrics(tiny.out / "watched" / "metrics.jsonl", "layers")[-1]
    for name in ("entropy_share", "largest_logit", "length", "gradient", "correlation", "rank", "kurtosis", "dead"):
        assert len(lines[-1][name]) == 2
    assert all(0.0 < share <= 1.0 for share in lines[-1]["entropy_share"])
    # The norm of a layer's matrices, of the same step as the norm of all its parameters.
    assert all(0.5 * every < matrices <= every for matrices, every in zip(lines[-1]["gradient"], layers["gradient_norm"], strict=True))
    events = EventAccumulator(str(tiny.out / "watched" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("watch/largest_logit/layer 2")] == [10, 20, 30, 40]


def test_an_alarm_stops_the_run_with_a_checkpoint_and_is_not_given_again(tiny: Settings, monkeypatch: pytest.MonkeyPatch):
    seen: list[list[int]] = []

    class Nervous(Alarms):
        """Gives an alarm at step 20, unless a row of that step was there when the run began."""

        def __init__(self, rows):
            rows = list(rows)
            seen.append([row.step for row in rows])
            super().__init__(rows)

        def check(self, row):
            super().check(row)
            return [Alarm("growing logits", row.step, "layer 2", 60.0, 50.0)] if row.step == 20 else []

    monkeypatch.setattr("shaped.train.run.diagnostics.Alarms", Nervous)
    said: list[str] = []
    settings = replace(tiny, steps=40, warmup=10, watch_every=10, watch_stop=True)
    with pytest.raises(
        Alarmed, match=r"stopped by an alarm \(step 20: growing logits in layer 2: 60, threshold 50; try: .*\) at step 20 of 40"
    ):
        pretrain(settings, log=said.append)
    assert any("growing logits in layer 2" in line for line in said)
    (alarm,) = read_metrics(tiny.out / "metrics.jsonl", "alarm")
    assert (alarm["step"], alarm["alarm"], alarm["layer"], alarm["value"], alarm["threshold"]) == (
        20,
        "growing logits",
        "layer 2",
        60.0,
        50.0,
    )
    assert pretrain(settings).steps == 40
    assert seen == [[], [10, 20]]


def test_a_watched_run_that_is_resumed_between_two_looks_writes_the_same_lines(tiny: Settings, monkeypatch: pytest.MonkeyPatch):
    whole = replace(tiny, steps=20, warmup=10, watch_every=10)
    cut = replace(whole, out=tiny.out / "cut", checkpoint_every=15)
    pretrain(replace(whole, out=tiny.out / "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "_look_for_alarms", lambda self, look=loop.Run._look_for_alarms: look(self) if self.step < 20 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pretrain(cut)
    pretrain(cut)
    one, other = (read_metrics(tiny.out / name / "metrics.jsonl", "watch") for name in ("whole", "cut"))
    assert one == other


def test_an_alarm_goes_to_tensorboard_also_if_it_is_no_forecast(tmp_path: Path):
    metrics = Metrics(tmp_path, 0, True, print)
    for left in (None, 7):
        metrics.write(3, "alarm", **describe_alarm(Alarm("growing logits", 3, "layer 2", 60.0, 50.0, left)))
    metrics.close()
    assert [event.value for event in EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("alarm/steps_left")] == [7.0]


def test_a_run_that_is_not_watched_keeps_no_losses(tiny: Settings):
    run = loop.Run(replace(tiny, steps=2, warmup=1), 0, 1, print, False, loop.StepperCache())
    run.finish()
    assert run._watched_losses == []


def test_a_stop_has_one_reason_in_all_processes(tiny: Settings, monkeypatch: pytest.MonkeyPatch):
    """The first process has an alarm: the others raise the same. Ctrl-C ends a study also if there is an alarm at that moment."""
    run = loop.Run(replace(tiny, steps=2, warmup=1, watch_every=1, watch_stop=True), 0, 1, print, False, loop.StepperCache())
    run.stop.alarm, run.stop.interrupted = "step 1: growing logits", True
    assert type(run._explain_stop()) is Stopped
    run.stop.interrupted = False
    assert type(run._explain_stop()) is Alarmed
    run.stop.alarm = ""
    others = iter([False, True])  # interrupted, alarmed
    monkeypatch.setattr(loop, "is_any", lambda flag, device: flag or next(others))
    error = run._explain_stop()
    assert type(error) is Alarmed
    assert "stopped by an alarm (of the first process) at step 0 of 2" in str(error)


def test_a_stop_without_watching_is_refused(tiny: Settings):
    with refused("watch_stop", "watch_every", "true"):
        replace(tiny, watch_stop=True)


def test_a_look_changes_neither_the_model_nor_the_random_numbers(tiny: Settings):
    run = loop.Run(replace(tiny, steps=2, warmup=1, watch_every=1), 0, 1, print, False, loop.StepperCache())
    before, state = {name: value.clone() for name, value in run.model.state_dict().items()}, torch.get_rng_state()
    run._watched_losses = [1.0]
    run._look_for_alarms()
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert math.isclose(read_metrics(run.out / "metrics.jsonl", "watch")[0]["loss"], 1.0)
