"""Timing by medians, and one place that writes what was measured."""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shaped
from shaped.files import write_json


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
    try:
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "commit": commit,
        "shaped": shaped.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def report(path: Path, command: str, result: dict[str, Any]) -> None:
    write_json(path, {"command": command, "environment": environment()} | result)
    print(f"written: {path}")
