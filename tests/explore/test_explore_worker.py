"""The worker: lines for a unit, a cancelled one, an urgent one in the middle of another, errors, and a config."""

import io
import json
from typing import Any
from unittest import mock

import pytest

from shaped.explore.config import read_values
from shaped.explore.fields import parse_question
from shaped.explore.first_answer import find_first_lines
from shaped.explore.panels import ANSWERS
from shaped.explore.units import STAGES, UNITS
from shaped.explore.worker import Worker
from shaped.hf.prediction.families import make_config

VALUES = parse_question({"width": "16", "depth": "4", "tokens": "2"}).values
GPT2 = {"model_type": "gpt2", "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50}


class Heard(Worker):
    """A worker that hears lines when the test says so, and not from a thread."""

    def __init__(self):
        self.heard = io.StringIO()
        super().__init__(io.StringIO(), self.heard)

    def hear(self, *messages: dict) -> None:
        self._lines = io.StringIO("".join(json.dumps(message) + "\n" for message in messages))
        self.read_lines()

    @property
    def said(self) -> list[dict]:
        return [json.loads(line) for line in self.heard.getvalue().splitlines()]


def job(number: int, unit: str, stage: int, **values) -> dict:
    return {"job": number, "unit": unit, "stage": stage, "values": VALUES | values}


def serve_next(worker: Heard) -> None:
    worker.serve(worker._waiting.popleft())


def test_a_unit_is_a_line_a_panel_and_an_end():
    worker = Heard()
    worker.hear(job(1, "laws", 0))
    serve_next(worker)
    *lines, last = worker.said
    assert last == {"job": 1, "ended": True}
    assert [line["line"]["panel"] for line in lines] == list(UNITS["laws"])
    assert all(line["line"]["stage"] == 0 and line["line"]["samples"] > 0 and line["line"]["seconds"] >= 0 for line in lines)


def test_a_cancelled_unit_ends_at_its_next_step():
    worker = Heard()
    steps = 0

    def endless(plan, breathe):
        nonlocal steps
        for steps in range(1000):
            if steps == 3:
                worker.hear({"cancel": 1})
            breathe(1)
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ANSWERS, "map", endless)
        worker.hear(job(1, "map", 1))
        serve_next(worker)
    assert steps == 3
    assert worker.said == [{"job": 1, "ended": True}]
    assert not worker._cancelled
    worker.hear({"cancel": 1})  # it came too late
    assert not worker._cancelled


def test_a_simulation_ends_at_the_step_at_which_its_question_is_cancelled():
    """Through `solve`, `propagate` and `backpropagate`: what the worker raises comes out of them."""
    worker = Heard()
    for number, unit in enumerate(UNITS):
        worker.hear(job(number, unit, 1, depth=100))
        taken = 0
        breathe = worker.breathe

        def count(steps: int = 0, number: int = number, breathe=breathe) -> None:
            nonlocal taken
            taken += 1
            if taken == 10:
                worker.hear({"cancel": number})
            breathe(steps)

        worker.breathe = count
        serve_next(worker)
        worker.breathe = breathe
        assert taken == 10
        assert worker.said[-1] == {"job": number, "ended": True}


def test_a_preview_is_answered_in_the_middle_of_a_finer_unit():
    worker = Heard()

    def slow(plan, breathe):
        worker.hear(job(3, "map", 1), job(2, "laws", 0))
        worker._waiting.rotate(1)  # the server gives a worker one unit of a finer stage at a time
        breathe(1)
        assert [said["job"] for said in worker.said if "ended" in said] == [2]
        yield from ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ANSWERS, "blocks", slow)
        worker.hear(job(1, "blocks", 2))
        serve_next(worker)
    assert [said["job"] for said in worker.said if "ended" in said] == [2, 1]


def test_what_has_no_answer_is_an_error_of_its_panel():
    worker = Heard()
    worker.hear(job(1, "map", 0, rho=0.95))
    serve_next(worker)
    (line, _) = worker.said
    assert line["line"]["panel"] == "map"
    assert line["line"]["error"].startswith("correlation must lie above rho")
    assert "\n" not in line["line"]["error"]


def test_an_unexpected_failure_is_one_line():
    worker = Heard()

    def broken(plan, breathe):
        raise KeyError("a\nb")
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ANSWERS, "map", broken)
        worker.hear(job(1, "map", 0))
        serve_next(worker)
    assert worker.said[0] == {"job": 1, "line": {"kind": "error", "error": r"KeyError: 'a\nb'"}}


def test_a_config_gives_values_and_says_what_it_leaves_out():
    found = read_values(json.dumps(GPT2))
    assert found["values"] == {"width": 48, "depth": 3, "heads": 4, "mask": "causal", "qk_norm": False}
    assert found["notes"] == ["hidden width 192: the block here has 48, the width"]
    worker = Heard()
    worker.hear({"job": 1, "unit": "config", "stage": 0, "values": {"text": json.dumps(GPT2)}})
    serve_next(worker)
    assert worker.said[0] == {"job": 1, "line": found}


def test_a_short_config_takes_no_long_memory():
    """transformers makes a name for each label, and in some families a word for each layer."""
    with mock.patch("shaped.hf.prediction.families.make_config", wraps=make_config) as made:
        assert read_values(json.dumps(GPT2 | {"num_labels": 10**9}))["values"]["width"] == 48
        assert "num_labels" not in made.call_args.args[1]
        for name in ("num_hidden_layers", "n_layer"):
            assert read_values(json.dumps(GPT2 | {name: 10**9})) == {"error": f"{name} must be at most 512, got 1000000000"}
        assert made.call_count == 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "config "),
        ("[]", "config must be a JSON object"),
        ('{"model_type": "t5"}', "model_type must be one of"),
        ('{"model_type": "gpt2"}', "config must have hidden_size"),
        (json.dumps(GPT2 | {"hidden_size": 8192}), "width must be from 8 to 4096, got 8192"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_in_one_line(text, error):
    found = read_values(text)
    assert set(found) == {"error"}
    assert found["error"].startswith(error)
    assert "\n" not in found["error"]


def test_a_config_that_breaks_transformers_does_not_end_the_worker():
    worker = Heard()
    with mock.patch("shaped.explore.worker.read_values", side_effect=TypeError("no\nnumber")):
        worker.hear({"job": 1, "unit": "config", "stage": 0, "values": {"text": "{}"}})
        serve_next(worker)
    assert [message["line"]["error"] for message in worker.said if "line" in message] == [
        "config must be a model's, got one that is not: no number"
    ]


def test_the_answer_that_the_page_opens_with_is_what_a_worker_computes():
    """`python docs/building/explore_first_answer.py` writes it anew after a change of the panels."""
    values = parse_question({}).values
    worker = Heard()
    for number, unit in enumerate(STAGES[0]):
        worker.hear({"job": number, "unit": unit, "stage": 0, "values": values})
        serve_next(worker)
    computed = [message["line"] | {"seconds": 0.0} for message in worker.said if "line" in message]
    shipped, now = flatten(find_first_lines(values)), flatten(computed)
    numbers = {place for place, value in now.items() if isinstance(value, float)}
    assert {place: value for place, value in shipped.items() if place not in numbers} == {
        place: value for place, value in now.items() if place not in numbers
    }
    last_digit = 1.1e-4  # of 5: processors round differently
    wrong = {place for place in numbers if shipped[place] != pytest.approx(now[place], rel=last_digit, abs=1e-9)}
    assert wrong == set()
    assert find_first_lines(values | {"gamma": 0.3}) == []


def flatten(value, path: str = "") -> dict[str, Any]:
    """Numbers and texts by their places."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return {place: part for name, inner in parts for place, part in flatten(inner, f"{path}/{name}").items()}
    return {path: value}
