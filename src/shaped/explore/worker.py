"""A process that computes units of answers. Its lines come and go as JSON by standard input and output.

In: `{"job": 7, "unit": "map", "stage": 1, "values": {…}}`, `{"cancel": 7}`. A line of stage 0 that comes while a finer stage is computed
is answered at once, between two steps of it. Out: `{"job": 7, "line": {…}}` for each line of the answer, `{"job": 7, "ended": true}` last.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from typing import Any, TextIO

import torch

from shaped.explore.config import read_values
from shaped.explore.fields import Question
from shaped.explore.panels import ANSWERS
from shaped.explore.plan import Plan
from shaped.explore.units import UNITS
from shaped.process import quote_error

Job = dict[str, Any]


class Cancelled(BaseException):
    """Nobody waits for the answer any more. No handler of errors may stop it."""


class Worker:
    def __init__(self, lines: TextIO, out: TextIO):
        self._lines, self._out = lines, out
        self._waiting: deque[Job] = deque()
        self._arrived = threading.Condition()
        self._unfinished: set[int] = set()
        self._cancelled: set[int] = set()
        self._under_way: list[Job] = []
        self._warm = False

    def read(self) -> None:
        """Runs in a thread of its own, and ends the process when the server is gone."""
        self.read_lines()
        os._exit(0)

    def read_lines(self) -> None:
        for text in self._lines:
            message = json.loads(text)
            with self._arrived:
                if "cancel" in message:
                    self._cancelled |= {message["cancel"]} & self._unfinished
                else:
                    self._unfinished.add(message["job"])
                    self._waiting.append(message)
                self._arrived.notify()

    def run(self) -> None:
        threading.Thread(target=self.read, daemon=True).start()
        self.say({"ready": os.getpid()})
        while True:
            with self._arrived:
                while not self._waiting:
                    self._arrived.wait()
                job = self._waiting.popleft()
            self.serve(job)

    def breathe(self, steps: int = 0) -> None:
        """Between two steps of a simulation: ends it if it is cancelled, and answers a question that is more urgent."""
        current = self._under_way[-1]
        if current["job"] in self._cancelled:
            raise Cancelled
        while current["stage"] and self._waiting and self._waiting[0]["stage"] == 0:
            self.serve(self._waiting.popleft())
            if current["job"] in self._cancelled:
                raise Cancelled

    def serve(self, job: Job) -> None:
        self._under_way.append(job)
        try:
            self.breathe()
            self.answer(job)
        except Cancelled:
            pass
        finally:
            self._under_way.pop()
            with self._arrived:
                self._unfinished.remove(job["job"])
                self._cancelled.discard(job["job"])
            self.say({"job": job["job"], "ended": True})

    def answer(self, job: Job) -> None:
        if job["unit"] == "config":
            try:
                line = read_values(job["values"]["text"])
            except Exception as error:  # transformers has several classes of errors for a field
                line = {"error": f"config must be a model's, got one that is not: {quote_error(error)}"}
            self.say({"job": job["job"], "line": line})
            return
        if job["stage"] and not self._warm:
            self._warm = warm_up()
        plan = Plan(Question(**job["values"]), job["stage"])
        told, began = set[str](), time.perf_counter()

        def tell(panel: str, stage: int | None, **found: Any) -> None:
            told.add(panel)
            line = {"kind": "panel", "panel": panel, "stage": job["stage"] if stage is None else stage} | found
            self.say({"job": job["job"], "line": line})

        try:
            for panel, samples, chart, stage in ANSWERS[job["unit"]](plan, self.breathe):
                tell(panel, stage, samples=samples, seconds=round(time.perf_counter() - began, 3), chart=chart)
        except (ValueError, ArithmeticError, MemoryError) as error:
            for panel in UNITS[job["unit"]]:
                if panel not in told:
                    tell(panel, None, error=quote_error(error, None))
        except Exception as error:
            self.say({"job": job["job"], "line": {"kind": "error", "error": f"{type(error).__name__}: {quote_error(error, None)}"}})

    def say(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message, allow_nan=False, separators=(",", ":")) + "\n")
        self._out.flush()


def warm_up() -> bool:
    """Loads what torch loads at the first backward pass, which takes a second: after the first preview, not before a later one."""
    x = torch.ones(1, requires_grad=True)
    torch.autograd.grad(2.0 * x, x, torch.ones(1))
    return True


def main() -> None:
    torch.set_num_threads(1)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not be read as a line
    Worker(sys.stdin, out).run()


if __name__ == "__main__":
    main()
