"""Computes the coarse answer that the page of `shaped explore` opens with: src/shaped/explore/first_answer.json.

python docs/building/explore_first_answer.py
"""

from __future__ import annotations

import io
import json
from typing import Any

import torch

from shaped.explore.fields import parse_question
from shaped.explore.first_answer import PLACE
from shaped.explore.units import STAGES
from shaped.explore.worker import Worker
from shaped.files import write_atomically


def compute_lines(values: dict[str, Any]) -> list[dict[str, Any]]:
    """What a worker says of stage 0, in the order of its units. The seconds are those of a page that finds them ready."""
    said = io.StringIO()
    for number, unit in enumerate(STAGES[0]):
        worker = Worker(io.StringIO(json.dumps({"job": number, "unit": unit, "stage": 0, "values": values})), said)
        worker.read_lines()
        worker.serve(worker._waiting.popleft())
    lines = [message["line"] for text in said.getvalue().splitlines() if "line" in (message := json.loads(text))]
    return [line | {"seconds": 0.0} for line in lines]


def main() -> None:
    torch.set_num_threads(1)
    values = parse_question({}).values
    text = json.dumps({"values": values, "lines": compute_lines(values)}, allow_nan=False, separators=(",", ":"))
    write_atomically(PLACE, lambda file: file.write(text.encode()))
    print(f"written: {PLACE.name}, {len(text)} characters")


if __name__ == "__main__":
    main()
