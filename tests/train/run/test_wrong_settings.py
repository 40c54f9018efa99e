"""Presets, bounds and empty paths of the settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refusals import refused
from shaped.train import study
from shaped.train.run.folder import find_differences
from shaped.train.run.settings import PRESETS, Settings
from train.conftest import status


def test_the_recipe_that_won_is_the_default_and_the_papers_a_preset(tmp_path: Path):
    won = {"recover_steps": 1000, "tau0": None, "steps": 20_000, "lr": 5e-4, "warmup": 1000, "decay": "linear", "embedding_lr": 10.0}
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
    best = Settings.of(places | {"preset": "best"})
    assert recipe(best) == won | {"lr": 2e-3, "embedding_lr": 2.5}
    assert best.qk_norm


def test_the_default_temperature_is_the_usual_one_with_qk_norm():
    """Without QK-norm it is the number that was the default before: folders of such runs have it in their settings."""
    plain, normalised = (Settings.of({"data": "d", "out": "o", "width": 64, "heads": 1, "qk_norm": qk_norm}) for qk_norm in (False, True))
    assert plain.choose_tau0() == plain.record()["tau0"] == plain.select_affecting("result")["tau0"] == 0.01
    assert normalised.choose_tau0() == normalised.record()["tau0"] == 0.125
    assert replace(normalised, tau0=0.5).choose_tau0() == 0.5
    assert "tau0" not in plain.to_toml()
    assert find_differences(replace(plain, tau0=0.01), plain) == []
    assert find_differences(replace(plain, tau0=0.02), plain) == ["tau0"]


@pytest.mark.parametrize(
    ("given", "unused"),
    [
        ({"norm": "rms", "dyt_alpha": 0.3, "shaping_lr": 2.0}, ["norm", "dyt_alpha", "shaping_lr"]),
        ({"norm": "rms", "embedding_norm": True, "gamma": 0.3, "tau0": 0.1}, []),
        ({"model": "preln", "norm": "rms", "gamma": 0.3, "tau0": 0.1}, ["gamma", "tau0"]),
        ({"model": "dyt", "norm": "rms", "dyt_alpha": 0.3, "embedding_norm": True}, ["norm"]),
        ({"model": "vanilla", "schedule": "learn", "gain_lr": 2.0, "qk_norm": True}, ["schedule"]),
        ({"objective": "causal", "borders": "respect", "positions": "rope", "rope_base": 500.0}, []),
    ],
)
def test_settings_that_a_model_ignores_are_named(given: dict[str, Any], unused: list[str]):
    assert Settings.of({"data": "d", "out": "o"} | given).find_unused() == unused


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
