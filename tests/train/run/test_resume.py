"""Runs that go on: after interruptions of all kinds, with damaged files, and only as the runs that they were."""

import fcntl
import json
import os
import re
import resource
import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from refusals import refused
from shaped.files import read_json, write_sealed
from shaped.train.data import prepare as data
from shaped.train.data.prepared import load_data
from shaped.train.folder_lock import Busy, folder_lock
from shaped.train.run import checkpoint, metrics
from shaped.train.run import loop as pretraining
from shaped.train.run.loop import Run, pretrain
from shaped.train.run.metrics import read_metrics
from shaped.train.run.progress import describe_time
from shaped.train.run.result import Result
from shaped.train.run.settings import Settings
from shaped.train.run.stopping import Stopped
from shaped.train.step.stepper_cache import StepperCache
from train.conftest import status
from train.runs import command, curve, quiet, start, wait_for, weights


def test_killed_and_resumed_is_bit_exact(tiny: Settings, tmp_path: Path):
    """SIGKILL after a checkpoint was written, at a moment of no one's choosing; then the same run."""
    killed = replace(tiny, out=tmp_path / "killed")
    quiet(tiny)
    process, said = start(killed), list[str]()
    wait_for(killed.out / "checkpoints" / "step-00000040", process)
    process.kill()
    process.join()
    assert not (killed.out / "result.json").exists(), "it was too late to kill it"
    pretrain(killed, log=said.append)
    assert "going on from step" in said[0]
    assert curve(killed.out) == curve(tiny.out)
    one, other = weights(tiny.out), weights(killed.out)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_slow_steps_can_be_stopped_one_by_one(tiny: Settings, monkeypatch: pytest.MonkeyPatch):
    """A large model on a CPU: nobody waits for 16 steps of half a minute each, and a line says how long it will take."""
    monkeypatch.setattr(pretraining, "SILENCE", 0.0)
    steps, said = Run(tiny, 0, 1, print, False, StepperCache()), list[str]()
    assert steps._count_at_once() == 16  # small models: the clock costs more
    monkeypatch.setattr(pretraining, "PATIENCE", 1e-9)
    with pytest.raises(Stopped, match="the time is over at step 1 of 120"):
        pretrain(replace(tiny, minutes=0.0), log=said.append)
    assert re.fullmatch(r"step 1 of 120: train loss \d\.\d+, about [\d.]+ (seconds|minutes) left", said[-1])
    monkeypatch.setattr(pretraining, "PATIENCE", 0.05)
    pretrain(tiny, log=said.append)
    steps._pace = 0.02
    assert steps._count_at_once() == 2
    steps._world = 2  # processes must agree on the number
    assert steps._count_at_once() == 16
    assert [describe_time(seconds) for seconds in (5, 89, 600, 5e3, 5.5e3, 1e5, 1e6)] == [
        f"about {words}" for words in ("5 seconds", "89 seconds", "10 minutes", "83 minutes", "1.5 hours", "28 hours", "12 days")
    ]


def test_resuming_from_every_checkpoint_is_bit_exact(tiny: Settings, tmp_path: Path):
    """Learn and QK-norm, whose gains Adam moves too, stopped by the clock and by the keyboard."""
    settings = replace(tiny, schedule="learn", qk_norm=True, qk_gain=True, clip=0.5, decay="linear")
    quiet(settings)
    other = replace(settings, out=tmp_path / "other")
    with pytest.raises(Stopped, match="step 16 of 120"):
        quiet(replace(other, minutes=0.0))
    run = Run(other, 0, 1, lambda line: None, False, StepperCache())
    assert run.step == 16
    advance = run._advance

    def interrupted(show) -> None:
        if run.step >= 56:
            os.kill(os.getpid(), signal.SIGINT)
        advance(show)

    run._advance = interrupted
    with pytest.raises(Stopped, match="interrupted at step 60 of 120; the same command goes on"):
        run.finish()
    result = quiet(other)
    assert curve(other.out) == curve(settings.out)
    assert all(torch.equal(weights(other.out)[name], value) for name, value in weights(settings.out).items())
    assert result.test_loss == Result.read(settings.out / "result.json").test_loss


@pytest.mark.parametrize("damage", ["truncated", "flipped", "description"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tiny: Settings, tmp_path: Path, damage: str):
    quiet(tiny)
    (tiny.out / "result.json").unlink()
    newest = checkpoint.list_checkpoints(tiny.out / "checkpoints")[-1]
    broken = newest / ("state.json" if damage == "description" else "state.safetensors")
    content = bytearray(broken.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    broken.write_bytes(content[: len(content) // 2] if damage != "flipped" else content)
    expected, said = weights(tiny.out), []
    pretrain(tiny, log=said.append)
    assert "step-00000120 is truncated or damaged" in said[0]
    assert "the one before it is used" in said[0]
    assert said[1] == "going on from step 80 of 120"
    assert all(torch.equal(weights(tiny.out)[name], value) for name, value in expected.items())


def test_if_all_checkpoints_are_damaged_nothing_begins_anew_by_itself(tiny: Settings):
    quiet(replace(tiny, steps=40))
    (tiny.out / "result.json").unlink()
    for path in checkpoint.list_checkpoints(tiny.out / "checkpoints"):
        (path / "state.safetensors").write_bytes(b"")
    with refused("checkpoints", "delete it to begin anew"):
        quiet(replace(tiny, steps=40))


@contextmanager
def no_larger_than(size: int) -> Iterator[None]:
    """Files: as on a full disk, what is written beyond that is refused by the kernel."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_model_that_cannot_be_written_is_written_by_the_same_command_later(tiny: Settings):
    settings = replace(tiny, steps=4)
    run = Run(settings, 0, 1, lambda line: None, False, StepperCache())
    run._advance(lambda *shown: None)
    with no_larger_than(4096), pytest.raises(OSError, match=rf"could not be written to {settings.out}: "):
        run._export()
    assert not {"result.json", "model.safetensors"} & {path.name for path in settings.out.iterdir()}
    quiet(settings)
    assert (settings.out / "model.safetensors").stat().st_mode == (settings.out / "result.json").stat().st_mode


def test_a_checkpoint_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state = {"values": torch.arange(5.0)}
    checkpoint.save(tmp_path, 1, state, {}, keep=2)
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(tmp_path, 2, state, {}, keep=2)
    monkeypatch.undo()
    with no_larger_than(300), pytest.raises(OSError, match=r"could not be written to .*step-00000002: .*too large"):
        checkpoint.save(tmp_path, 2, {"values": torch.zeros(1000)}, {}, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    (tmp_path / "other").write_text("")
    assert {path.stat().st_mode for path in (tmp_path / "step-00000001").iterdir()} == {(tmp_path / "other").stat().st_mode}
    (tmp_path / "other").unlink()
    for step in (2, 3):
        checkpoint.save(tmp_path, step, state, {}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    found = checkpoint.read_latest(tmp_path, print)
    assert found is not None
    assert torch.equal(found[0]["values"], state["values"])


def test_a_run_is_not_continued_with_other_settings(tiny: Settings):
    quiet(replace(tiny, steps=20))
    (tiny.out / "result.json").unlink()
    with refused("lr", "0.01", "0.001", "another out, or delete"):
        quiet(replace(tiny, steps=20, lr=1e-3))
    quiet(replace(tiny, steps=20, log_every=5, keep=1))  # how it is watched may change


def test_a_run_that_failed_before_its_first_step_holds_no_folder(tiny: Settings, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(pretraining, "build_model", lambda *model: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            quiet(tiny)
    assert not tiny.out.exists()
    assert quiet(replace(tiny, width=16, steps=4)).width == 16
    assert Settings.from_toml(tiny.out / "settings.toml").width == 16


def test_the_status_of_a_run_whose_time_is_over_is_its_own(
    tiny: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    config = command(tiny)[-1]
    assert status(monkeypatch, "pretrain", "--config", config, "--minutes", "0") == 75
    assert "the time is over at step 16 of 120; the same command goes on from there" in capsys.readouterr().out
    assert status(monkeypatch, "pretrain", "--config", config) == 0


def test_a_second_run_in_a_folder_is_refused(tiny: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """While the first one lives, by one line and without harm; and no longer, once that was killed."""
    long = replace(tiny, steps=100_000)
    first = start(long)
    try:
        wait_for(long.out / "checkpoints", first)
        assert status(monkeypatch, *command(long)[2:]) == 2
        said = capsys.readouterr().err
        assert said == f"shaped: out must be a folder in which no other process works, got {long.out}, where one does\n"
        assert first.is_alive()
        with pytest.raises(Busy):
            quiet(long)
    finally:
        first.kill()
        first.join()
    assert (long.out / ".lock").exists()  # it had no time to remove it
    with pytest.raises(Stopped, match="the time is over"):
        quiet(replace(long, minutes=0.0))
    assert not (long.out / ".lock").exists()


def test_a_lock_that_was_removed_while_it_was_waited_for_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first one finishes, and removes the file, between the second's opening and locking it."""
    flock, calls = fcntl.flock, []

    def late(handle: int, how: int) -> None:
        if not calls:
            (tmp_path / ".lock").unlink()
        calls.append(handle)
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with folder_lock(tmp_path):
        assert len(calls) == 2
        with pytest.raises(Busy), folder_lock(tmp_path):
            pass
    with folder_lock(tmp_path):
        pass


def damaged_descriptions(right: dict[str, Any]) -> list[Any]:
    wrong: list[Any] = [[], 3, None, {}]
    wrong += [right | {key: value} for key in ("step", "sha256", "layout", "data", "losses") for value in (None, True, "x", -1)]
    return wrong + [{other: right[other] for other in right if other != key} for key in ("step", "sha256", "layout", "data", "losses")]


def test_a_description_of_any_shape_is_passed_by(tiny: Settings):
    """The checkpoint is named, and the one before it used."""
    settings = replace(tiny, steps=32, checkpoint_every=8, keep=2)
    quiet(settings)
    (tiny.out / "result.json").unlink()
    about = checkpoint.list_checkpoints(tiny.out / "checkpoints")[-1] / "state.json"
    right = read_json(about)  # without its seal: of an older version
    for content in [*map(json.dumps, damaged_descriptions(right)), "[" * 100_000]:
        about.write_text(content)
        said: list[str] = []
        assert Run(settings, 0, 1, said.append, False, StepperCache()).step == 24
        assert "step-00000032 is truncated or damaged" in said[0]
        assert "\n" not in said[0]
    about.write_text(json.dumps(right | {"losses": ["x"]}))
    with refused("checkpoints", "32 steps", str(tiny.out)):
        Run(settings, 0, 1, lambda line: None, False, StepperCache())


WRONG_LINES = ["3", "[]", "{}", '{"step": "x", "kind": "test"}', '{"step": 1, "kind": []}', "\0\0", "[" * 100_000, "", "NaN"]
WRONG_LINES += ['{"step": 1, "kind": "test", "loss": "x"}', '{"step": 1, "kind": "test"}', '{"step": 1, "kind": "other", "loss": 1.0}']
WRONG_LINES += ['{"step": 1, "kind": "layers", "entropy": ["x"]}', '{"step": 1, "kind": "train", "loss": 1e999, "count": 1}', "\xff"]


def test_metrics_of_any_shape_are_refused_and_left_out_by_a_run_that_goes_on(tiny: Settings):
    quiet(replace(tiny, steps=4))
    path = tiny.out / "metrics.jsonl"
    right = path.read_text()
    flipped = right.splitlines()[0].replace('"loss": ', '"loss": 1')  # another number, which the checksum tells
    for line in (*WRONG_LINES, flipped):
        path.write_bytes(f"{right}{line}\n{right}".encode("latin-1"))
        with refused(str(path), f"line {1 + right.count(chr(10))}"):
            read_metrics(path)
        said: list[str] = []
        metrics.Metrics(tiny.out, 4, False, said.append)
        assert path.read_text() == 2 * right  # what comes after a line that is none is not lost
        assert said == [f"{path} has 1 line that cannot be read: left out"]
    (tiny.out / "result.json").unlink()
    about = checkpoint.list_checkpoints(tiny.out / "checkpoints")[-1] / "state.json"
    path.write_text(right.splitlines()[0] + "\n")
    said = []
    pretrain(replace(tiny, steps=4), log=said.append)
    assert said[1] == f"{path} has 1 of the 3 lines that were written up to step 4: the others are lost"
    write_sealed(about, read_json(about) | {"losses": []})
    path.write_bytes(b"\xff\n")
    (tiny.out / "result.json").unlink()
    with refused("metrics", str(tiny.out)):
        quiet(replace(tiny, steps=4))


def test_the_losses_of_a_result_are_those_of_the_last_step(tiny: Settings):
    """Also where the metrics of the last steps are lost, and their checkpoint is not."""
    settings = replace(tiny, steps=40, evaluate_every=20)
    result = quiet(settings)
    path = settings.out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert json.loads(lines[1])["step"] == 20
    assert json.loads(lines[1])["loss"] != result.test_loss
    about = checkpoint.list_checkpoints(settings.out / "checkpoints")[-1] / "state.json"
    right = read_json(about)
    assert 0.0 < right["seconds"] <= result.seconds
    for seconds, kept in ((None, lines[:2]), (1000.0, [line for line in lines if '"train"' in line]), ("x", [])):
        path.write_text("".join(kept))
        write_sealed(about, right | {"seconds": seconds})  # older checkpoints have none
        (settings.out / "result.json").unlink()
        again = quiet(settings)
        assert again.test_loss == result.test_loss
        assert (again.seconds >= 1000.0) == (seconds == 1000.0)  # of both commands
        # The mean of all lines that there are.
        means = [json.loads(line)["loss"] for line in lines if '"train"' in line and (line in kept or '"step": 40,' in line)]
        assert again.train_loss == pytest.approx(sum(means) / len(means), rel=1e-12)


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_run_does_not_go_on_with_other_text(is_finished: bool, tiny: Settings, tmp_path: Path, text: Path):
    """Nor is the result of a finished one given for it. Rows of another length make another model, but it is the text that is wrong."""
    tiny = replace(tiny, steps=17)
    result = None
    if is_finished:
        result = quiet(tiny)
    else:
        with pytest.raises(Stopped):
            pretrain(replace(tiny, minutes=0.0), log=lambda _: None)
    for name, length in (("other", load_data(tiny.data).length), ("shorter", 16)):
        data.prepare([str(text)], tmp_path / name, vocab=80, length=length, valid_share=0.2, progress=False)
        with refused("data must be what the run", name):
            pretrain(replace(tiny, data=tmp_path / name), log=lambda _: None)
    if result is not None:
        with refused("data must be a folder made by", "text.txt"):
            pretrain(replace(tiny, data=text), log=lambda _: None)
        assert pretrain(replace(tiny, data=tmp_path / "gone"), log=lambda _: None) == result
        done = tiny.out / "result.json"
        write_sealed(done, {name: value for name, value in read_json(done).items() if name not in ("data", "seal")})  # of an older version
        assert pretrain(tiny, log=lambda _: None).test_loss == result.test_loss


def test_a_run_from_before_a_setting_existed_goes_on(tiny: Settings):
    """Without `objective` and `optimiser`, in its settings.toml and in its checkpoint."""
    settings = replace(tiny, steps=20, checkpoint_every=16)
    with pytest.raises(Stopped):
        quiet(replace(settings, minutes=0.0))
    older = "".join(line for line in settings.to_toml().splitlines(keepends=True) if not line.startswith(("objective", "optimiser")))
    assert len(older.splitlines()) == len(settings.to_toml().splitlines()) - 2
    (settings.out / "settings.toml").write_text(older)
    about = checkpoint.list_checkpoints(settings.out / "checkpoints")[-1] / "state.json"
    write_sealed(about, read_json(about) | {"settings": older})
    said: list[str] = []
    pretrain(settings, log=said.append)
    assert said[0] == "going on from step 16 of 20"


def test_without_posix_locks_training_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on Windows, where the module is still imported."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    module = runpy.run_path(str(sys.modules[Busy.__module__].__file__))
    with refused("training needs a POSIX system: Linux or macOS"), module["folder_lock"](tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()
