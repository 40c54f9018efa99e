"""Settings: one class, its TOML and its options."""

import os
import re
import subprocess
import sys
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from refusals import refused
from shaped.nn.blocks import BLOCKS
from shaped.nn.initialisations import INITIALISATIONS
from shaped.nn.norms import NORMS
from shaped.nn.schedules import SCHEDULES
from shaped.train.run.options import AFFECTS, TOPICS
from shaped.train.run.settings import HINTS, Settings
from shaped.train.run.settings_page import write_page
from shaped.train.step.learning_rates import DECAYS
from shaped.train.step.objectives import OBJECTIVES
from shaped.train.step.optimisers import OPTIMISERS

CHANGED = Settings(
    data=Path("some/data"), out=Path('a "run"'), model="preln", hidden=100, gamma_feedforward=0.2, lr=1e-3, tied=True, minutes=1.5
)


def test_toml_and_back(tmp_path: Path):
    path = tmp_path / "settings.toml"
    path.write_text(CHANGED.to_toml())
    assert Settings.from_toml(path) == CHANGED
    assert Settings.from_toml(path, lr=2e-3) == replace(CHANGED, lr=2e-3)
    odd = replace(CHANGED, data=Path("\U0001f600 \xe9 \x7f \x80 \\ \n\t\"'"), out=Path("\ufffe\u20ac"))
    path.write_text(odd.to_toml())
    assert Settings.from_toml(path) == odd
    assert odd.to_toml().isascii()  # it is printed too, wherever that is
    path.write_bytes('data = "\U0001f600"\nout = "\xe9"\n'.encode())
    assert Settings.from_toml(path).data == Path("\U0001f600")


def test_every_setting_is_an_option_with_its_help_and_default():
    wide = os.environ | {"COLUMNS": "300"}
    done = subprocess.run([sys.executable, "-m", "shaped", "pretrain", "--help"], capture_output=True, text=True, check=True, env=wide)
    shown = " ".join(done.stdout.replace("│", " ").split())  # without line breaks and panels
    for about in fields(Settings):
        assert f"--{about.name.replace('_', '-')} " in shown
        assert about.metadata["help"].replace("`", "") in shown.replace("`", "")
        if about.default not in (MISSING, None):
            assert f"Default: {str(about.default).lower()}." in shown
        if choices := about.metadata["choices"]:  # in brackets, or each with what it is
            described = all(f"{choice}: " in about.metadata["help"] for choice in choices)
            assert f"--{about.name.replace('_', '-')} {'NAME' if described else '[' + '|'.join(choices) + ']'}" in shown


def test_options_prevail_over_the_file(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from shaped.commands import app as cli

    (tmp_path / "run.toml").write_text(
        f'data = "{prepared}"\nout = "{tmp_path / "run"}"\ntensorboard = false\nlr = 0.5\n'
        "depth = 1\nwidth = 16\nheads = 2\nbatch = 8\nsteps = 4\nwarmup = 1\n"
    )
    monkeypatch.setattr(sys, "argv", ["shaped", "pretrain", "--config", str(tmp_path / "run.toml"), "--lr", "0.001", "--no-train-gains"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    shown = capsys.readouterr().out
    assert "lr = 0.001\n" in shown
    assert "train_gains = false\n" in shown
    assert "test loss" in shown
    made = asdict(Settings.from_toml(tmp_path / "run" / "settings.toml"))
    assert (made["lr"], made["train_gains"], made["width"]) == (0.001, False, 16)


def test_learning_rates():
    given: dict[str, Any] = {"data": Path("d"), "out": Path("o"), "lr": 2.0, "warmup": 4, "steps": 12}
    constant, linear = Settings(**given, decay="none"), Settings(**given)
    assert [constant.learning_rate(step) for step in (0, 1, 3, 4, 11)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    assert [linear.learning_rate(step) for step in (0, 3, 4, 8, 11)] == [0.5, 2.0, 2.0, 1.0, 0.25]
    assert Settings.of(given | {"warmup": 0}).learning_rate(0) == 2.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "bert"}, ("model", "shaped, preln", "bert")),
        ({"schedule": "x"}, ("schedule", "x")),
        ({"depth": 0}, ("depth", "0")),
        ({"depth": 1.5}, ("depth", "1.5")),
        ({"depth": True}, ("depth", "True")),
        ({"heads": 7}, ("heads", "768", "7")),
        ({"lr": -1.0}, ("lr", "-1")),
        ({"lr": float("nan")}, ("lr", "nan")),
        ({"lr": "fast"}, ("lr", "fast")),
        ({"gamma": 1.5}, ("gamma", "1.5")),
        ({"mask_share": 2.0}, ("mask_share", "2")),
        ({"mask_share": 0}, ("mask_share", "above 0", "0")),
        ({"embedding_std": 1e4}, ("embedding_std", "1000", "10000")),
        ({"head_std": 1e4}, ("head_std", "1000", "10000")),
        ({"tied": 1}, ("tied", "1")),
        ({"tied": True, "head_lr": 0.5}, ("head_lr", "tied", "0.5")),
        ({"tied": True, "head_std": 0.0}, ("head_std", "tied", "0")),
        ({"tied": True, "embedding_std": 0.0}, ("embedding_std", "tied", "0")),
        ({"tau0": 0.0}, ("tau0", "0")),
        ({"qk_gain": True}, ("qk_gain", "qk_norm", "True")),
        ({"init": "gpt2"}, ("init", "theory", "shaped", "gpt2")),
        ({"model": "vanilla", "init": "bert"}, ("init", "theory", "vanilla", "bert")),
        ({"dyt_alpha": 0.0}, ("dyt_alpha", "0")),
        ({"norm": "batch"}, ("norm", "layer, rms", "batch")),
        ({"decay": "linear", "steps": 10}, ("warmup", "10", "1000")),
        ({"out": 3}, ("out", "3")),
        ({"out": ""}, ("out", "path", "''")),
        ({"data": "a\0b"}, ("data", "path")),
        ({"data": "a\udcff"}, ("data", "path", "udcff")),
        ({"speed": 3}, ("settings", "speed")),
        ({"activation": "gelu", "c_minus": -2.0}, ("c_minus", "-1.0", "gelu", "-2.0")),
        ({"seed": 1 << 64}, ("seed", str(1 << 64))),
        ({"lr": 10**400}, ("lr", "number")),
        ({"data": None}, ("data", "must be given")),
        ({"watch_every": -1}, ("watch_every", "-1")),
    ],
)
def test_wrong_settings_are_refused(given: dict, words: tuple[str, ...]):
    with refused(*words):
        Settings.of({"data": "d", "out": "o"} | given)


WRONG = ("[]", "{}", "[1]", '"x"', "true", "nan", "-1", "1e400", "1979-05-27", '"\\u0000"')


@pytest.mark.parametrize("name", [about.name for about in fields(Settings)])
def test_a_value_of_a_wrong_type_is_refused_in_a_line(tmp_path: Path, name: str):
    """Of each setting, every value of these that is none of its kind."""
    path, kind = tmp_path / "settings.toml", HINTS[name]
    needed = {"qk_gain": {"qk_norm": "true"}, "watch_stop": {"watch_every": "10"}}.get(name, {})
    right = {Path: ('"x"',), bool: ("true",)}.get(kind, ("-1",) if name == "c_minus" else ())
    for value in WRONG:
        given = {"data": '"d"', "out": '"o"'} | needed | {name: value}
        path.write_text("".join(f"{key} = {text}\n" for key, text in given.items()))
        if value in right:
            Settings.from_toml(path)
        else:
            with refused(name):
                Settings.from_toml(path)


@pytest.mark.parametrize("content", [b"\xff", b"=", b"lr = " + b"[" * 100_000, b"lr = 1" + b"0" * 5000, b"[data]\nx = 1", b"[[out]]"])
def test_what_is_no_settings_file_is_refused_in_a_line(tmp_path: Path, content: bytes):
    (tmp_path / "settings.toml").write_bytes(content)
    with refused("config must be a TOML file" if b"]" not in content else "must be"):
        Settings.from_toml(tmp_path / "settings.toml", **({} if b"]" in content else {"data": "d", "out": "o"}))


def test_the_page_of_settings_is_that_of_the_code():
    page = Path(__file__).parents[3] / "docs" / "settings.md"
    assert page.read_text(encoding="utf-8") == write_page(), "run `python -m shaped.train.run.settings_page > docs/settings.md`"


def test_the_page_of_settings_has_the_bounds():
    page = write_page()
    for name, values in (("depth", "from 1 to 4,096"), ("width", "from 1 to 1,048,576"), ("steps", "≥ 1"), ("seed", "≥ 0")):
        assert re.search(rf"\| `{name}` \| `\d+` \| whole number {values} \|", page), name


def test_every_setting_has_a_topic_and_says_what_it_affects():
    for about in fields(Settings):
        assert about.metadata["topic"] in TOPICS
        assert about.metadata["affects"] in AFFECTS
        assert about.metadata["used_by"] in ("", "gains", "shaping", "norms", "dyt", "rope", *SCHEDULES, *OBJECTIVES)
    settings = Settings(data=Path("d"), out=Path("o"))
    parts = [settings.select_affecting(name) for name in AFFECTS]
    assert sum(map(len, parts)) == len(fields(Settings))
    assert settings.select_affecting("place") == {"data": Path("d"), "out": Path("o"), "minutes": None}
    assert settings.select_affecting("speed").keys() == {"device", "compile", "graph", "attention"}
    assert settings.record().keys() == asdict(settings).keys() - {"data", "out", "minutes"}


@pytest.mark.parametrize(
    ("name", "registry"),
    [
        ("model", BLOCKS),
        ("norm", NORMS),
        ("init", INITIALISATIONS),
        ("schedule", SCHEDULES),
        ("decay", DECAYS),
        ("optimiser", OPTIMISERS),
        ("objective", OBJECTIVES),
    ],
)
def test_choices_help_and_errors_come_from_the_registry(name: str, registry: dict[str, Any]):
    about = Settings.__dataclass_fields__[name].metadata
    assert about["choices"] == tuple(registry)
    assert all(f"{entry}: {registry[entry].about}" in about["help"] for entry in registry)
    with refused(name, ", ".join(registry), "other"):
        Settings.of({"data": "d", "out": "o", name: "other"})
