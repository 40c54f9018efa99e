"""Timing by medians, and one place that writes what was measured."""

from __future__ import annotations

import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shaped
from shaped.files import write_json
from shaped.train.run.result import find_commit


def median_seconds(work: Callable[[], object], *, repeats: int = 7, warmup: int = 1) -> float:
    def timed() -> float:
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for _ in range(warmup):
        work()
    return statistics.median(timed() for _ in range(repeats))


def environment() -> dict[str, Any]:
    return {
        "commit": find_commit(),
        "shaped": shaped.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def report(path: Path, result: dict[str, Any]) -> None:
    program = Path(sys.argv[0]).resolve().relative_to(Path(__file__).resolve().parents[1])
    command = shlex.join(["python", program.as_posix(), *sys.argv[1:]])
    write_json(path, {"command": command, "environment": environment()} | result)
    print(f"written: {path}")
