"""RunOptions: the options that `solve` and `propagate` share, checked once."""

from __future__ import annotations

import math
import sys
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch

from shaped.checks import check_device, in_range, quote, whole_number
from shaped.engine.progress import Progress

Record = str | int


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How paths are simulated, whatever the process. `solve` documents each option.

    Numbers are converted here: afterwards `seed` is an int, whatever kind of whole number was given.
    """

    samples: int | None
    seed: int
    record: Record
    upper: float | None
    lower: float | None
    device: str | torch.device
    dtype: torch.dtype
    chunk: int | None
    executor: Executor | None
    progress: Progress

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float64 or torch.float32, got {self.dtype}")
        self._set(device=check_device(self.device), seed=whole_number("seed", self.seed, least=0, most=math.inf))
        for name in ("samples", "chunk"):
            if getattr(self, name) is not None:
                self._set(**{name: whole_number(name, getattr(self, name))})
        for name in ("upper", "lower"):
            if getattr(self, name) is not None:
                self._set(**{name: in_range(name, getattr(self, name), 0.0, sys.float_info.max)})
        if self.upper is not None and self.upper <= (self.lower or 0.0):
            least = "0" if self.lower is None else f"lower, {self.lower:g}: else no path could run"
            raise ValueError(f"upper must be larger than {least}, got {self.upper:g}")
        if not (isinstance(self.record, str) and self.record in ("all", "last")):
            try:
                self._set(record=whole_number("record", self.record))
            except ValueError:
                raise ValueError(f"record must be 'all', 'last' or a whole number of steps, at least 1, got {quote(self.record)}") from None
        if self.executor is not None and not callable(getattr(self.executor, "submit", None)):
            got = type(self.executor).__name__
            raise ValueError(f"executor must have a method submit, as those of concurrent.futures have, got {got}")

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def list_recorded_steps(self, steps: int) -> tuple[int, ...]:
        """The numbers of the steps that are recorded."""
        if isinstance(self.record, str):
            return tuple(range(steps + 1)) if self.record == "all" else (steps,)
        return (*range(0, steps, self.record), steps)
