"""Damaged, foreign and endless files in the folder of a run: refused in one line, and nothing lost."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from damage import Outcome, judge
from refusals import refused
from shaped.files import read_json, sha256, write_sealed
from shaped.train.folder_lock import Busy, folder_lock
from shaped.train.run.folder import read_settings
from shaped.train.run.loop import Run, pretrain
from shaped.train.run.settings import Settings
from shaped.train.run_records import read_runs
from shaped.train.step.stepper_cache import StepperCache
from train.conftest import status
from train.run.damaged_runs import Place
from train.run.stopped_runs import stop_half_way
from train.runs import quiet, weights

# Random damages


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("damaged"))


@pytest.mark.parametrize("number", range(32))
def test_a_random_damage_is_never_passed_over_in_silence(place: Place, number: int):
    """`python tests/damage.py --count 1000` tries more of them."""
    what, outcome = place.try_damage(np.random.default_rng([1, number]))
    assert not outcome.startswith("WRONG"), what


def test_what_would_be_wrong_is_told():
    right = Outcome(0, (), "1.5")
    assert judge(right, right) == "right answer"
    assert judge(Outcome(2, ("shaped: x must be y, got z",)), right) == "refused"
    assert judge(Outcome(0, ("x is made anew",), "1.5"), right) == "right answer, and a word"
    for wrong in (
        Outcome(0, (), "1.6"),
        Outcome(2, ()),
        Outcome(2, ("shaped: one", "shaped: two")),
        Outcome(1, (), "1.5"),
        Outcome(0, (), "1.5", "Traceback"),
    ):
        assert judge(wrong, right).startswith("WRONG")


# What a run reads before its first step


@pytest.mark.parametrize("name", ["train.bin", "valid.bin", "tokenizer/tokenizer.json"])
def test_nothing_is_trained_on_data_other_than_data_json_says(tiny: Settings, tmp_path: Path, name: str):
    """One token that is another one; one letter of the vocabulary."""
    folder = tmp_path / "data"
    shutil.copytree(tiny.data, folder)
    content = bytearray((folder / name).read_bytes())
    place = content.index(b'"ba"') + 1 if name.endswith("json") else 100
    content[place] ^= 1
    (folder / name).write_bytes(content)
    with refused("data must have", Path(name).parts[0], f"prepare {folder} again"):
        quiet(replace(tiny, data=folder, steps=4))
    assert not tiny.out.exists()
    shutil.rmtree(folder / "tokenizer")
    if name.startswith("tokenizer"):
        quiet(replace(tiny, data=folder, steps=4, save_model=False, keep=0))  # which needs none


# Checkpoints


def test_a_description_with_another_number_in_it_is_passed_by(tiny: Settings):
    settings = stop_half_way(tiny)
    about = settings.out / "checkpoints" / "step-00000008" / "state.json"
    about.write_text(about.read_text().replace('"losses": [\n  ', '"losses": [\n  1'))
    said: list[str] = []
    assert Run(settings, 0, 1, said.append, False, StepperCache()).step == 4
    assert "step-00000008 is truncated or damaged" in said[0]


@pytest.mark.parametrize("change", ["fewer", "more", "one number for all", "other type"])
def test_the_tensors_of_a_checkpoint_must_be_the_models(tiny: Settings, change: str):
    """By their names and shapes, whatever their hash says. A single number would fit into every shape."""
    settings = stop_half_way(tiny)
    folder = settings.out / "checkpoints" / "step-00000008"
    state = {name: tensor.clone() for name, tensor in load_file(folder / "state.safetensors").items()}
    if change == "fewer":
        del state["matrices.first"]
    elif change == "more":
        state["other"] = torch.zeros(1)
    elif change == "one number for all":
        state["matrices.first"] = torch.zeros(1)
    else:
        state["matrices.first"] = state["matrices.first"].double()
    save_file(state, folder / "state.safetensors")
    write_sealed(folder / "state.json", read_json(folder / "state.json") | {"sha256": sha256(folder / "state.safetensors")})
    with refused("checkpoints must be of this model", str(settings.out)):
        quiet(settings)


def test_only_folders_of_our_names_are_checkpoints(tiny: Settings):
    """Others are neither read nor deleted, and none of them stops a run."""
    settings = stop_half_way(tiny)
    folder = settings.out / "checkpoints"
    others = ["step-00000008.bak", "step-best", "step-9", "step-000000100", "step-0000000x", "step-99999999-copy"]
    for name in others:
        shutil.copytree(folder / "step-00000004", folder / name)
    for name in ("step-notes.txt", "step-00000012"):
        (folder / name).write_text("mine")
    said: list[str] = []
    pretrain(settings, log=said.append)
    assert said[:2] == [f"{folder / 'step-00000012'} is not a folder, so it is no checkpoint: left alone", "going on from step 8 of 16"]
    left = {path.name for path in folder.iterdir()}
    assert left == {"step-00000012", "step-00000016", "step-00000012.other-1", "step-notes.txt", *others}
    assert (folder / "step-00000012.other-1").read_text() == "mine"


def test_a_run_that_lost_its_settings_goes_on_only_as_what_it_was(tiny: Settings):
    settings = stop_half_way(tiny)
    (settings.out / "settings.toml").unlink()
    with refused("lr must be 0.01", str(settings.out), "0.5"):
        quiet(replace(settings, lr=0.5))
    quiet(settings)


# Processes


def test_a_rank_without_a_world_is_a_process_like_any_other(tiny: Settings, monkeypatch: pytest.MonkeyPatch):
    settings = stop_half_way(tiny)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with refused("lr must be 0.01", str(settings.out)):
        quiet(replace(settings, lr=0.5))
    with folder_lock(settings.out), pytest.raises(Busy):
        quiet(settings)
    for name, wrong in (("RANK", "x"), ("RANK", "2"), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "two")):
        with monkeypatch.context() as patch:
            patch.setenv("WORLD_SIZE", "2")
            patch.setenv(name, wrong)
            with refused(name, wrong):
                quiet(settings)


# Files


def test_an_empty_settings_toml_is_named(
    tiny: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    settings = stop_half_way(tiny)
    path = settings.out / "settings.toml"
    path.write_text("")
    with refused("data must be given", str(path)):
        quiet(settings)
    assert status(monkeypatch, "pretrain", "--config", str(path)) == 2
    assert str(path) in capsys.readouterr().err


def test_settings_that_changed_are_not_those_of_the_run(tiny: Settings):
    settings = stop_half_way(tiny)
    path = settings.out / "settings.toml"
    assert read_settings(settings.out) == settings  # without the time limit of the command that wrote them
    path.write_text(path.read_text().replace("lr = 0.01", "lr = 0.02", 1))
    with refused(str(path), "first line", "delete the file"):
        quiet(settings)
    with refused(str(path), "first line"):
        read_runs([settings.out])
    assert Settings.from_toml(path).lr == 0.02  # for another run it is a file like any other
    path.unlink()
    quiet(settings)
    assert read_settings(settings.out) == settings


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_not_waited_for(
    tiny: Settings, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A pipe that no one writes to, a device without an end."""

    def put(path: Path) -> Path:
        path.unlink(missing_ok=True)
        {"pipe": lambda: os.mkfifo(path), "device": lambda: path.symlink_to("/dev/zero"), "folder": path.mkdir}[kind]()
        return path

    settings = stop_half_way(tiny)
    for path in (settings.out / "metrics.jsonl", settings.out / "diverged.json", settings.out / "result.json"):
        put(path)
        with refused(str(settings.out), "folder" if kind == "folder" else "pipe or device"):
            read_runs([settings.out])
        path.rmdir() if kind == "folder" else path.unlink()
    config = put(tmp_path / "config.toml")
    for arguments in (["pretrain", "--config", str(config)], ["study", str(config)]):
        assert status(monkeypatch, *arguments) == 2
        assert str(config) in capsys.readouterr().err
    file = tmp_path / "all.json"
    file.write_text(json.dumps({"log": "all.jsonl", "runs": []}))
    put(tmp_path / "all.jsonl")
    assert status(monkeypatch, "collect", str(file), "--out", str(tmp_path / "again.json")) == 2
    assert capsys.readouterr().err.count("\n") == 1
    put(settings.out / "checkpoints" / "step-00000008" / "state.safetensors")
    said: list[str] = []
    assert Run(settings, 0, 1, said.append, False, StepperCache()).step == 4
    assert "step-00000008 is truncated or damaged" in said[0]


WRONG_FILES: list[Any] = [
    {"log": "/dev/zero"},
    {"log": "../all.jsonl"},
    {"log": 3},
    {"runs": 3},
    {"runs": [3]},
    {"runs": [{"name": 3}]},
    {"unfinished": 3},
    {"unfinished": [3]},
    {"unfinished": [{"name": "x", "why": "", "settings": []}]},
    {"unfinished": [{"name": "x", "why": "", "settings": {}}]},
    {"unfinished": [{"name": "x", "why": "", "settings": {"model": "shaped"}}]},
]
WRONG_ROWS: list[dict[str, Any]] = [
    {"glue": 3},
    {"glue": {"rte": 3}},
    {"glue": {"rte": {"task": "rte", "score": "accuracy", "seeds": [0]}}},
    {"glue": {"rte": {"task": "rte", "score": "accuracy", "seeds": [0], "accuracy": {"mean": "x"}}}},
    {"glue": {"rte": {"task": "cola", "score": "accuracy", "seeds": [0], "accuracy": {"mean": 0.5}}}},
    {"steps": "many"},
    {"lr": 0.5},
    {"depth": 10**9},
    {"settings": {"width": []}},
    {"settings": {"speed": 3}},
]


def test_collected_runs_of_any_shape_are_refused_in_a_line(tiny: Settings, tmp_path: Path, monkeypatch, capsys):
    """Made elsewhere, so without a seal."""
    quiet(replace(tiny, steps=4, keep=0, save_model=False))
    file = tmp_path / "all.json"
    assert status(monkeypatch, "collect", str(tiny.out), "--out", str(file)) == 0
    assert [run.name for run in read_runs([file])] == [tiny.out.name]
    right = read_json(file)
    del right["log_sha256"]
    row = right["runs"][0]
    wrong = [right | change for change in WRONG_FILES] + [right | {"runs": [row | change]} for change in WRONG_ROWS]
    wrong += [{name: value for name, value in right.items() if name != gone} for gone in ("log", "runs")]
    for content in [*map(json.dumps, wrong), "[" * 100_000, '{"log": NaN}', json.dumps(right)[:-30], "{}", "[]"]:
        file.write_text(content)
        with refused("runs must be folders", str(file)):
            read_runs([file])
    file.write_text(json.dumps(right))
    log = tmp_path / "all.jsonl"
    lines = log.read_text()
    assert [len(run.metrics) for run in read_runs([file])] == [3]
    for line in ('{"run": "run", "step": 4, "kind": "test"}', '{"run": 3, "step": 4, "kind": "test", "loss": 1.0}', "[" * 100_000):
        log.write_text(lines + line + "\n")
        with refused("runs must be folders", str(file)):
            read_runs([file])
    log.write_text(lines.replace('"entropy": [', '"entropy": [], "x": ['))
    with refused("2 layers, got 0"):
        read_runs([file])


def test_a_finished_run_is_what_it_wrote(tiny: Settings, tmp_path: Path):
    """Weights, config, tokenizer, settings, metrics: another content is named, by pretrain too, which makes them again when asked to."""
    settings = replace(tiny, steps=4)
    result = quiet(settings)
    right = {name: value.clone() for name, value in weights(tiny.out).items()}  # which are read from the file when they are needed
    for name in ("model.safetensors", "config.json", "tokenizer.json", "metrics.jsonl", "settings.toml"):
        path = tiny.out / name
        content = path.read_bytes()
        path.write_bytes(content[:-2] + b" " + content[-1:])
        with refused(str(path), "as the run wrote it"):
            quiet(settings)
        path.unlink()
        with refused(str(path), "must be there"):
            quiet(settings)
        path.write_bytes(content)
    (tiny.out / "model.safetensors").write_bytes(b"")
    (tiny.out / "result.json").unlink()
    assert quiet(settings).test_loss == result.test_loss
    assert all(torch.equal(weights(tiny.out)[name], value) for name, value in right.items())
