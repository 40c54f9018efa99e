"""Damaged, foreign and endless files, other people's folders, settings without measure: said in one line, and nothing lost."""

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
from shaped.train import study
from shaped.train.folder_lock import Busy, folder_lock
from shaped.train.run import checkpoint
from shaped.train.run.folder import read_settings
from shaped.train.run.loop import Run, pretrain
from shaped.train.run.settings import PRESETS, Settings
from shaped.train.run.stopping import Stopped
from shaped.train.run_records import read_runs
from shaped.train.step.stepper_cache import StepperCache
from train.conftest import status
from train.damaged_runs import Place
from train.runs import quiet, weights


def begun(settings: Settings) -> Settings:
    """A run of 16 steps that was stopped after 8."""
    settings = replace(settings, steps=16, checkpoint_every=4, evaluate_every=4, keep=2)
    for _ in range(2):
        with pytest.raises(Stopped):
            quiet(replace(settings, minutes=0.0))
    assert [path.name for path in checkpoint.list_checkpoints(settings.out / "checkpoints")] == ["step-00000004", "step-00000008"]
    return settings


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
    settings = begun(tiny)
    about = settings.out / "checkpoints" / "step-00000008" / "state.json"
    about.write_text(about.read_text().replace('"losses": [\n  ', '"losses": [\n  1'))
    said: list[str] = []
    assert Run(settings, 0, 1, said.append, False, StepperCache()).step == 4
    assert "step-00000008 is truncated or damaged" in said[0]


@pytest.mark.parametrize("change", ["fewer", "more", "one number for all", "other type"])
def test_the_tensors_of_a_checkpoint_must_be_the_models(tiny: Settings, change: str):
    """By their names and shapes, whatever their hash says. A single number would fit into every shape."""
    settings = begun(tiny)
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
    settings = begun(tiny)
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
    settings = begun(tiny)
    (settings.out / "settings.toml").unlink()
    with refused("lr must be 0.01", str(settings.out), "0.5"):
        quiet(replace(settings, lr=0.5))
    quiet(settings)


# Processes


def test_a_rank_without_a_world_is_a_process_like_any_other(tiny: Settings, monkeypatch: pytest.MonkeyPatch):
    settings = begun(tiny)
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
    settings = begun(tiny)
    path = settings.out / "settings.toml"
    path.write_text("")
    with refused("data must be given", str(path)):
        quiet(settings)
    assert status(monkeypatch, "pretrain", "--config", str(path)) == 2
    assert str(path) in capsys.readouterr().err


def test_settings_that_changed_are_not_those_of_the_run(tiny: Settings):
    settings = begun(tiny)
    path = settings.out / "settings.toml"
    assert read_settings(settings.out) == replace(settings, minutes=0.0)
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

    settings = begun(tiny)
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


# Settings


def test_the_recipe_that_won_is_the_default_and_the_papers_a_preset(tmp_path: Path):
    won = {"recover_steps": 1000, "tau0": 0.01, "steps": 20_000, "lr": 5e-4, "warmup": 1000, "decay": "linear", "embedding_lr": 10.0}
    paper = {"recover_steps": 4000, "tau0": 1.0, "steps": 100_000, "lr": 5e-4, "warmup": 4000, "decay": "none", "embedding_lr": 1.0}
    places = {"data": "d", "out": "o"}

    def recipe(settings: Settings) -> dict[str, Any]:
        return {name: getattr(settings, name) for name in won}

    assert recipe(Settings.of(places)) == won
    assert recipe(Settings.of(places | {"preset": "paper"})) == paper
    assert recipe(Settings.of(places | {"tau0": 0.5, "preset": "paper"})) == paper | {"tau0": 0.5}
    path = tmp_path / "settings.toml"
    path.write_text('data = "d"\nout = "o"\npreset = "paper"\nsteps = 7\n')
    assert recipe(Settings.from_toml(path, warmup=3)) == paper | {"steps": 7, "warmup": 3}
    path.write_text('data = "d"\nout = "o"\nsteps = 7\n')
    assert recipe(Settings.from_toml(path, preset="paper")) == paper | {"steps": 7}
    for wrong in ("own", 3, None, []):
        with refused("preset must be one of paper", repr(wrong)):
            Settings.of(places | {"preset": wrong})
    path.write_text(Settings.of(places).to_toml())  # it has every setting, so that nothing is left for a preset
    with refused("preset must change a setting", str(path), "delete from the file", "recover_steps, tau0"):
        Settings.from_toml(path, preset="paper")
    assert PRESETS["paper"] == paper


def test_a_study_may_have_a_preset(tmp_path: Path):
    path = tmp_path / "study.toml"
    path.write_text('out = "o"\n[defaults]\ndata = "d"\npreset = "paper"\n[[run]]\nname = "a"\n[[run]]\nname = "b"\nsteps = 20\n')
    runs, _, _ = study.read_study(path)
    assert [(run.steps, run.tau0) for run in runs.values()] == [(100_000, 1.0), (20, 1.0)]


@pytest.mark.parametrize(
    ("name", "value"),
    [("c_minus", -1e39), ("c_minus", 1e60), ("lr", 1e39), ("clip", 1e60), ("depth", 10**9), ("width", 10**15), ("hidden", 10**15)],
)
def test_settings_have_bounds(name: str, value: float):
    with refused(name, str(value)):
        Settings.of({"data": "d", "out": "o", "heads": 1, name: value})


def test_a_wrong_setting_is_called_by_its_own_name():
    for wrong in ("x", True, [], 2.0, -1.0):
        with refused("gamma_feedforward must"):
            Settings.of({"data": "d", "out": "o", "gamma_feedforward": wrong})


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["pretrain", "--data", "d", "--out", ""], "--out"),
        (["pretrain", "--data", "", "--out", "o"], "--data"),
        (["pretrain", "--config", ""], "--config"),
        (["data", "prepare", "--text", "t.txt", "--out", ""], "--out"),
        (["study", "s.toml", "--out", ""], "--out"),
        (["collect", "runs", "--out", ""], "--out"),
        (["glue", "run", "--task", "rte", "--data", ""], "--data"),
    ],
)
def test_an_empty_path_is_not_the_folder_one_is_in(
    arguments: list[str], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert status(monkeypatch, *arguments) == 2
    said = capsys.readouterr().err
    assert option in said
    assert "must be a path, got ''" in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# Studies


@pytest.mark.parametrize("name", ["study.json", "study.jsonl"])
def test_a_run_of_a_study_cannot_have_the_name_of_its_files(tmp_path: Path, name: str):
    (tmp_path / "study.toml").write_text(f'out = "o"\n[[run]]\ndata = "d"\nname = "{name}"\n')
    with refused("names of runs", repr(name)):
        study.read_study(tmp_path / "study.toml")


def test_a_study_has_a_largest_number_of_runs(tmp_path: Path):
    """A hundred million combinations are counted, not made."""
    lists = "".join(f"{name} = {list(range(1, 101))}\n" for name in ("steps", "seed", "log_every", "keep"))
    (tmp_path / "study.toml").write_text(f'out = "o"\n[[run]]\ndata = "d"\nwarmup = 0\n{lists}')
    with refused("at most 10000 runs", "100000000"):
        study.read_study(tmp_path / "study.toml")


def test_a_finished_run_that_was_damaged_is_a_failure_of_its_study(tiny: Settings, tmp_path: Path):
    lines = "".join(line + "\n" for line in replace(tiny, steps=4).to_toml().splitlines() if line.split(" ")[0] != "out")
    queue = '[[run]]\nname = "a"\n[[run]]\nname = "b"\nseed = 1\n'
    (tmp_path / "study.toml").write_text(f'out = "{tmp_path / "runs"}"\n[defaults]\n{lines}{queue}')
    assert len(study.study(tmp_path / "study.toml", log=lambda line: None)["runs"]) == 2
    path = tmp_path / "runs" / "a" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": ', '"loss": 1', 1))
    said: list[str] = []
    summary = study.study(tmp_path / "study.toml", only=["b"], log=said.append)
    assert [run["name"] for run in summary["runs"]] == ["b"]
    assert list(summary["failed"]) == ["a"]
    assert said[-1].startswith(f"a: {path} must be as the run wrote it")
