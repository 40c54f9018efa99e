"""Wrong studies are refused; a damaged run is a failure of its study."""

from dataclasses import replace
from pathlib import Path

import pytest

from refusals import refused
from shaped.train import study
from shaped.train.run.settings import Settings


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
