"""The study of whether alarms come in time (benchmarks/studies/alarms.py): its plan, what a death is, and a command that was killed."""

import json
from pathlib import Path
from typing import Any

import pytest

from programs import load_program
from shaped.intervals import exact_interval
from shaped.watching.rows import Row


@pytest.fixture(scope="module")
def study() -> Any:
    return load_program("studies/alarms")


def test_the_judging_half_has_enough_sound_runs_to_bound_the_false_alarms(study: Any):
    settings = study.list_settings()
    assert len({one.name for one in settings}) == len({one.seed for one in settings}) == len(settings) == 126
    sound = [one for one in settings if one.half == "judging" and (one.qk_norm or one.lr <= 2 * study.SOUND_RATES[one.kind])]
    assert len(sound) == 75
    assert exact_interval(0, len(sound))[1] < 0.05


def make_rows(shares: list[float], correlation: float = 0.5) -> list[Row]:
    return [
        Row(10 * n, 1.0, {"entropy_share": {"a": 0.9, "b": one}, "correlation": {"a": 1.0, "b": correlation}})
        for n, one in enumerate(shares)
    ]


def test_what_a_death_is(study: Any):
    falling, living = [3.0 - 0.01 * n for n in range(100)], make_rows([0.9] * 10)
    assert study.find_death(living, falling) is None
    assert study.find_death(living, falling + [2.4] * 50 + falling[-50:]) is None  # it came back
    assert study.find_death(living, falling + [2.9] * 50) == (113, "diverged")  # the mean of 20 losses rose from 2.105 to 2.64
    assert study.find_death(living, [*falling, float("nan")]) == (100, "diverged")
    assert study.find_death(make_rows([0.9, 0.01, 0.9, 0.9, 0.01, 0.01]), falling) == (40, "entropy")
    assert study.find_death(make_rows([0.9] * 3, 0.995), falling) == (0, "rank")


def test_a_killed_command_loses_only_the_runs_that_it_was_at(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = study.make_text(0, 4, 40)
    monkeypatch.setattr(study, "make_text", lambda seed: text)
    one, other = study.list_settings()[:2]
    made = study.make_run(one, 3, tmp_path)
    (path,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(study, "train", lambda *_: pytest.fail("it was made again"))
        assert study.make_run(one, 3, tmp_path) == made
    for setting, steps in ((one, 2), (other, 3)):
        assert not study.is_done(path, setting, steps)
    assert len(json.loads(path.read_text())["losses"]) == 3
