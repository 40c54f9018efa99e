"""A run's folder while others look at it, and after moves that were interrupted."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shaped.train.run import checkpoint
from shaped.train.run import metrics as run_metrics
from shaped.train.run.folder import claim_folder, read_settings
from shaped.train.run.metrics import read_metrics
from shaped.train.run.result import find_commit
from shaped.train.run.settings import Settings
from shaped.train.run.stopping import Diverged, Stopped
from shaped.train.run_records import read_folder
from train.runs import quiet


def test_an_interrupted_move_of_a_diverged_run_goes_on(tiny: Settings, monkeypatch: pytest.MonkeyPatch):
    """Wherever it was interrupted, the folder is free for other settings after the next claim."""
    breaks, other = replace(tiny, lr=1e38, warmup=0, steps=2, log_every=1, checkpoint_every=1), replace(tiny, lr=1e-3)
    rename = Path.rename
    for allowed in range(3):
        with pytest.raises(Diverged):
            quiet(breaks)
        (breaks.out / "checkpoints" / "step-00000001").mkdir(parents=True, exist_ok=True)
        moved: list[Path] = []

        def break_off(path: Path, target: Path, allowed: int = allowed, moved: list[Path] = moved) -> Path:
            if len(moved) == allowed:
                raise KeyboardInterrupt
            moved.append(path)
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", break_off)
            with pytest.raises(KeyboardInterrupt):
                claim_folder(other)
        claim_folder(other)
        assert {path.name.rstrip("0123456789") for path in breaks.out.iterdir()} == {"diverged-"}
        shutil.rmtree(breaks.out)


def test_the_folder_of_a_run_that_is_being_written_can_be_read(tiny: Settings, monkeypatch: pytest.MonkeyPatch):
    """Its process writes more metrics, and a checkpoint that counts them, between two readings."""
    with pytest.raises(Stopped):
        quiet(replace(tiny, minutes=0.0))
    read = run_metrics.read_json_lines
    path = tiny.out / "metrics.jsonl"
    counted = checkpoint.count_metrics(tiny.out / "checkpoints")

    def read_then_write(read_path: Path, parse: Callable[[str], dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[int, str]]:
        content = read(read_path, parse)
        monkeypatch.setattr(checkpoint, "count_metrics", lambda folder: (counted[0] + 50, counted[1] + 1))
        return content

    monkeypatch.setattr(run_metrics, "read_json_lines", read_then_write)
    assert read_folder(tiny.out).metrics == read_metrics(path)


def test_the_time_of_a_command_is_no_setting_of_the_run(tiny: Settings):
    """`pretrain --config RUN/settings.toml` does not stop when that command did."""
    with pytest.raises(Stopped):
        quiet(replace(tiny, minutes=0.0))
    assert read_settings(tiny.out).minutes is None


def test_a_run_that_stops_at_a_checkpoint_writes_it_once(tiny: Settings, monkeypatch: pytest.MonkeyPatch):
    """Writing it again would remove the good one first."""
    saved: list[int] = []
    save = checkpoint.save

    def count(folder: Path, step: int, *given: object) -> Path:
        saved.append(step)
        return save(folder, step, *given)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(checkpoint, "save", count)
    with pytest.raises(Stopped):
        quiet(replace(tiny, minutes=0.0, checkpoint_every=1))
    assert saved == [1]


def test_an_installed_copy_has_no_commit_of_the_project_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SHAPED_COMMIT", raising=False)
    for words in (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "result.py").write_text("")
    monkeypatch.setattr("shaped.train.run.result.__file__", str(tmp_path / "result.py"))
    assert find_commit() == "unknown"
    subprocess.run(["git", "add", "result.py"], cwd=tmp_path, check=True)
    assert find_commit() not in ("", "unknown")
