"""Studies: a queue of runs that goes on after whatever happens to one of them."""

import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from refusals import refused
from shaped.files import read_json
from shaped.train import study
from shaped.train.folder_lock import file_lock, folder_lock
from shaped.train.run.loop import Run, pretrain
from shaped.train.run.settings import Settings
from shaped.train.run_records import read_runs
from shaped.train.tables import entropy_curves, table1
from train.conftest import status


def study_file(tiny: Settings, folder: Path, runs: str) -> Path:
    """A study in folder/runs of runs that are like the tiny one but for what they say."""
    defaults = "".join(line + "\n" for line in tiny.to_toml().splitlines() if line.split(" ")[0] != "out")
    (folder / "study.toml").write_text(f'out = "{folder / "runs"}"\n[defaults]\n{defaults}{runs}')
    return folder / "study.toml"


def test_a_study_runs_its_queue_within_its_time(tiny: Settings, tmp_path: Path):
    """Two learning rates and Pre-LN; those of one shape share a stepper, and give what they give alone."""
    file = study_file(tiny, tmp_path, '[[run]]\nname = "shaped"\nlr = [1e-3, 1e-2]\n[[run]]\nname = "preln"\nmodel = "preln"\nlr = 1e-2\n')
    said: list[str] = []
    summary = study.study(file, minutes=1e-9, log=said.append)
    assert summary["runs"] == []
    assert len(summary["unfinished"]) == 3
    summary = study.study(file, only=["preln"], log=said.append)
    assert [run["name"] for run in summary["runs"]] == ["preln"]
    with pytest.raises(ValueError, match=r"^only must be among shaped-lr0\.001, shaped-lr0\.01, preln, got postln$"):
        study.study(file, only=["postln"])
    summary = study.study(file, log=said.append)
    assert [run["name"] for run in summary["runs"]] == ["shaped-lr0.001", "shaped-lr0.01", "preln"]
    alone = pretrain(replace(tiny, out=tmp_path / "alone"), log=lambda line: None)
    assert summary["runs"][1]["test_loss"] == alone.test_loss
    assert read_json(tmp_path / "runs" / "study.json") == summary
    logs = [json.loads(line) for line in (tmp_path / "runs" / "study.jsonl").read_text().splitlines()]
    assert {line["run"] for line in logs} == {"shaped-lr0.001", "shaped-lr0.01", "preln"}
    runs = read_runs([tmp_path / "runs"])
    rows = table1(run.result for run in runs if run.result)
    assert [(row["name"], row["lr"]) for row in rows] == [("preln", 1e-2), ("recover", 1e-2)]
    assert rows[1]["test_loss"] == alone.test_loss
    curves = entropy_curves(runs, layers=(1, 2, 7))
    assert [(one["name"], one["lr"], one["layer"], one["steps"]) for one in curves][:2] == [
        ("preln", 1e-2, 1, [60, 120]),
        ("preln", 1e-2, 2, [60, 120]),
    ]
    keys = {"model", "schedule", "depth", "width", "steps", "lr", "gamma", "seed", "train_loss", "test_loss", "command", "commit"}
    assert all(keys <= run.keys() for run in summary["runs"])
    again = {run.name: run for run in read_runs([tmp_path / "runs" / "study.json"])}
    assert again.keys() == {run.name for run in runs}
    for run in runs:
        assert (again[run.name].settings, again[run.name].result) == (run.settings, run.result)
        assert [line["kind"] for line in again[run.name].metrics] == [line["kind"] for line in run.metrics]


RUN = 'out = "x"\n[[run]]\ndata = "d"\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ("out",)),
        ('out = "x"\nruns = 1', ("runs",)),
        ('out = "x"\n[[run]]\nlearning = 1', ("learning",)),
        ("=", ("TOML",)),
        (RUN + 'name = "a"\n[[run]]\nname = "a"\ndata = "d"\n', ("a twice",)),
        (RUN + "lr = []", ("lr", "[]")),
        (RUN + "lr = [[1]]", ("lr", "[1]")),
        (RUN + "lr = {a = 1}", ("lr", "a")),
        (RUN + 'name = "../a"', ("names", "../a")),
        (RUN + 'name = "a/b"', ("names", "a/b")),
        (RUN + "name = 'a\\b'", ("names", "folders")),
        (RUN + 'name = ".."', ("names", "..")),
        (RUN + 'name = ""', ("names", "''")),
        (RUN + 'name = "a\\u0000"', ("names", "folders")),
        ('out = "x"\n[[run]]\ndata = ["a/b", "c"]', ("names", "a/b")),
        ('out = 3\n[[run]]\ndata = "d"', ("out", "3")),
        ('out = ["x"]\n[[run]]\ndata = "d"', ("out", "x")),
        ('out = "x"\ndata = 3\n[[run]]\n', ("data", "3")),
        ('out = "x"\nrun = 3', ("run", "3")),
        ('out = "x"\nrun = [3]', ("run", "3")),
        ('out = "x"\nrun = {data = "d"}', ("run", "data")),
        ('out = "x"\ndefaults = 3\n[[run]]\ndata = "d"', ("defaults", "3")),
        ('out = "x"\nminutes = "x"\n[[run]]\ndata = "d"', ("minutes", "x")),
        ('out = "x"\nminutes = []\n[[run]]\ndata = "d"', ("minutes", "[]")),
        ('out = "x"\nminutes = -1\n[[run]]\ndata = "d"', ("minutes", "-1")),
        (RUN + "minutes = 3.5", ("minutes", "top", "3.5")),
        ('out = "x"\n[defaults]\nminutes = 3.5\n[[run]]\ndata = "d"', ("minutes", "top", "3.5")),
        (RUN + 'out = "y"', ("out", "top", "y")),
    ],
)
def test_a_wrong_study_is_refused(tmp_path: Path, content: str, words: tuple[str, ...]):
    (tmp_path / "study.toml").write_text(content)
    with refused(*words):
        study.study(tmp_path / "study.toml")


BREAKS = '[[run]]\nname = "breaks"\nlr = 1e38\nwarmup = 0\nsteps = 1\nlog_every = 1\n'


def test_a_run_that_diverged_is_remembered(tiny: Settings, tmp_path: Path):
    """And not tried again, until a setting changes; then what it left is set aside."""
    file = study_file(tiny, tmp_path, BREAKS)
    folder, said = tmp_path / "runs" / "breaks", []
    first = study.study(file, log=said.append)["unfinished"]
    assert "not finite" in first[0]["why"]
    times = [(path, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))]
    again = study.study(file, only=["breaks"], log=said.append)
    assert again["unfinished"] == first
    assert said[-1] == f"breaks: not tried again (delete {folder / 'diverged.json'} for that): {first[0]['why']}"
    assert times == [(path, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))]
    study_file(tiny, tmp_path, BREAKS.replace("1e38", "1e-3"))
    assert [run["name"] for run in study.study(file, log=said.append)["runs"]] == ["breaks"]
    assert not (folder / "diverged.json").exists()
    assert (folder / "diverged-1" / "diverged.json").exists()
    assert Settings.from_toml(folder / "diverged-1" / "settings.toml").lr == 1e38
    assert not (folder / ".lock").exists()


def test_reports_of_processes_that_share_a_study_wait_for_each_other(tiny: Settings, tmp_path: Path):
    """A report is two files, and the newest records: without the lock they could be those of two processes."""
    runs, _, out = study.read_study(study_file(tiny, tmp_path, BREAKS))
    reporting = threading.Thread(target=study.write_report, args=(runs, {}, set(), out))
    with file_lock(out / study.LOCK):
        reporting.start()
        reporting.join(0.3)
        assert reporting.is_alive()
        assert not (out / "study.json").exists()
    reporting.join(10)
    assert read_json(out / "study.json")["runs"] == []


def test_a_run_that_fails_does_not_stop_the_queue(tiny: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Too little text for the batch, too little memory, a folder that holds something else or is in use; and one that works."""
    names = ("large", "memory", "other", "damaged", "busy", "works")
    queue = "".join(f'[[run]]\nname = "{name}"\nbatch = {1000 if name == "large" else 16}\n' for name in names)
    file = study_file(replace(tiny, steps=4), tmp_path, queue)
    advance, runs = Run._advance, tmp_path / "runs"

    def short_of_memory(run: Run, show) -> None:
        if run.out.name == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
        advance(run, show)

    monkeypatch.setattr(Run, "_advance", short_of_memory)
    for name, content in (("other", replace(tiny, steps=5).to_toml()), ("damaged", "=")):
        (runs / name).mkdir(parents=True)
        (runs / name / "settings.toml").write_text(content)
        (runs / name / "metrics.jsonl").write_text('{"step": 1, "kind": "train"}\n')
    said: list[str] = []
    with folder_lock(runs / "busy"):
        summary = study.study(file, log=said.append)
    assert [run["name"] for run in summary["runs"]] == ["works"]
    assert list(summary["failed"]) == ["large", "memory", "other", "damaged"]
    assert summary["failed"]["memory"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert "batch must be at most" in summary["failed"]["large"]
    assert "steps must be 5" in summary["failed"]["other"]
    assert "TOML" in summary["failed"]["damaged"]
    assert [(run["name"], run["why"]) for run in summary["unfinished"]] == [(name, "") for name in names[:-1]]
    assert any(line.startswith("busy: out must be a folder in which no other process works") for line in said)
    assert all("\n" not in line for line in said)
    assert read_json(runs / "study.json") == summary
    assert {run.name for run in read_runs([runs / "study.json"])} == set(names)


def test_the_status_of_a_study_says_how_it_went(
    tiny: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    one, other = '[[run]]\nname = "a"\n', '[[run]]\nname = "b"\nbatch = 1000\n'
    file = study_file(replace(tiny, steps=4), tmp_path, one)
    assert status(monkeypatch, "study", str(file), "--minutes", "1e-9") == 75
    assert "0 finished, 0 diverged, 0 failed, 1 unfinished" in capsys.readouterr().out
    assert status(monkeypatch, "study", str(file)) == 0
    study_file(replace(tiny, steps=4), tmp_path, one + other)
    assert status(monkeypatch, "study", str(file), "--only", "a") == 0
    assert status(monkeypatch, "study", str(file)) == 1
    assert "1 finished, 0 diverged, 1 failed, 0 unfinished" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "benchmarks" / "studies").glob("*.toml")), ids=lambda path: path.stem)
def test_the_studies_here_can_be_read(path: Path):
    runs, _, _ = study.read_study(path)
    assert len(runs) >= 2
    assert all(settings.keep == 0 or settings.save_model for settings in runs.values())


@pytest.mark.parametrize(("place", "code"), [("pipe", 1), ("full", 2)])
def test_what_nobody_reads_is_trained_all_the_same(
    tiny: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str, code: int
):
    """By a study and by pretrain, into a pipe that is closed and to a device that is full, whose error is said at the end."""
    short = replace(tiny, steps=4, warmup=1, recover_steps=2)
    file, config = study_file(short, tmp_path, '[[run]]\nname = "one"\n[[run]]\nname = "two"\n'), tmp_path / "config.toml"
    config.write_text(short.to_toml())
    for command, folders in (
        (["study", str(file)], [tmp_path / "runs" / "one", tmp_path / "runs" / "two"]),
        (["pretrain", "--config", str(config)], [tiny.out]),
    ):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w", 1) if place == "pipe" else open("/dev/full", "w", 1) as out, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            assert status(patch, *command) == code
        if place == "full":
            os.close(writing)
            said = capsys.readouterr().err.splitlines()[-1]
            results = tiny.out if command[0] == "pretrain" else tmp_path / "runs"
            assert said == f"shaped: standard output must take what is printed, got 'No space left on device'; the results are in {results}"
        assert all((folder / "result.json").exists() for folder in folders)
