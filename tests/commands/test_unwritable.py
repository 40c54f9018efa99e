"""What cannot be written is refused before the work, not after it."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_runner import make_runner

from refusals import refused
from shaped import files
from shaped.files import check_writable
from shaped.train import glue, run_records
from shaped.train.data import prepare
from shaped.train.study import study

NOWHERE = Path("/proc/self/runs")  # not even root makes files there
WORK = {
    "simulate": "shaped.commands.simulate.compute",
    "converge": "shaped.commands.converge.compute",
    "advise": "shaped.advise",
    "predict": "shaped.hf.prediction.simulation.predict",
    "diagnose": "shaped.commands.diagnose.load_subject",
    "reproduce": "shaped.figures.harness.reproduce.reproduce",
    "collect": "shaped.train.run_records.read_runs",
}
RESULTS = {"reproduce": "report.html", "diagnose": "diagnosis.html", "collect": "out.jsonl"}
run = make_runner()


def fail(*_: Any, **__: Any) -> None:
    raise AssertionError("the work has begun")


def make_arguments(command: str, folder: Path, config: Path) -> list[str]:
    given = {"advise": ["--width", "200", "--depth", "10"], "predict": [str(config)], "diagnose": [str(config)], "collect": [str(config)]}
    return [command, *given.get(command, []), "--out", str(folder / "out.json" if command == "collect" else folder)]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2}))
    return path


@pytest.mark.parametrize("command", WORK)
def test_a_command_finds_out_before_its_work(
    command: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(WORK[command], fail)
    assert run(monkeypatch, *make_arguments(command, NOWHERE, config)) == 2
    said = capsys.readouterr().err
    assert said.startswith("shaped: out must be a folder that can be ")
    assert str(NOWHERE) in said
    folder = tmp_path / "full"
    (folder / RESULTS.get(command, f"{command}.json")).mkdir(parents=True)
    assert run(monkeypatch, *make_arguments(command, folder, config)) == 2
    assert "which is a folder" in capsys.readouterr().err


def test_training_finds_out_before_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    text, queue = tmp_path / "text.txt", tmp_path / "queue.toml"
    text.write_text("a word\n")
    monkeypatch.setattr(prepare, "fingerprint", fail)  # it reads the whole text
    with refused("out must be a folder that can be written", str(NOWHERE)):
        prepare.prepare([str(text)], NOWHERE)
    assert run(monkeypatch, "pretrain", "--data", str(tmp_path), "--out", str(NOWHERE)) == 2
    assert f"out must be a folder that can be made, got {NOWHERE}" in capsys.readouterr().err
    queue.write_text(f'out = "{tmp_path / "runs"}"\n[[run]]\ndata = "{tmp_path}"\n')
    (tmp_path / "runs" / "study.json").mkdir(parents=True)
    monkeypatch.setattr("shaped.train.study.pretrain", fail)
    with refused("out must be a folder into which study.json can be written", "which is a folder"):
        study(queue)


def test_no_run_is_fine_tuned_if_the_scores_of_one_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    runs = [tmp_path / "one", tmp_path / "two"]
    for folder in runs:
        folder.mkdir()
        for name in ("result.json", "config.json"):
            (folder / name).write_text("{}")
    (runs[1] / "glue-rte.json").mkdir()
    monkeypatch.setattr("shaped.train.glue.Result.read", fail)
    assert run(monkeypatch, "glue", *map(str, runs), "--task", "cola", "--task", "rte") == 2
    assert "run must be a folder into which glue-rte.json can be written" in capsys.readouterr().err
    with refused("run must be", "glue-rte.json"):
        glue.glue(runs[1], glue.GlueSettings("rte"), None)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with refused("out must be a folder", str(place), "a file"):
            check_writable(place)
    check_writable(tmp_path / "new" / "deeper", files=("a",))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied", f"{dir}/tmp123")

    monkeypatch.setattr(files, "TemporaryFile", refuse)
    with refused("run must be a folder that can be written", "Permission denied"):
        check_writable(tmp_path, "run")
    with refused("out must be a folder that can be written"):
        run_records.collect([], tmp_path / "all.json")
