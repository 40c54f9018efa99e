"""RunOptions: the options that `solve` and `propagate` share, checked once."""

from __future__ import annotations

import math
import sys
from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from shaped.checks import check_device, in_range, keep, quote, whole_number
from shaped.engine.progress import Progress

Record = str | int


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How paths are simulated, whatever the process. `solve` documents each option.

    Numbers are converted here: afterwards `seed` is an int, whatever kind of whole number was given.
    """

    samples: int | None = None
    seed: int
    record: Record
    upper: float | None = None
    lower: float | None = None
    device: str | torch.device
    dtype: torch.dtype
    chunk: int | None = None
    executor: Executor | None = None
    progress: Progress = None

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float64 or torch.float32, got {self.dtype}")
        object.__setattr__(self, "device", check_device(self.device))
        keep(self, whole_number, "seed", least=0, most=math.inf)
        keep(self, whole_number, "samples", "chunk")
        keep(self, in_range, "upper", "lower", low=0.0, high=sys.float_info.max)
        if self.upper is not None and self.upper <= (self.lower or 0.0):
            least = "0" if self.lower is None else f"lower, {self.lower:g}: else no path could run"
            raise ValueError(f"upper must be larger than {least}, got {self.upper:g}")
        if not (isinstance(self.record, str) and self.record in ("all", "last")):
            try:
                keep(self, whole_number, "record")
            except ValueError:
                raise ValueError(f"record must be 'all', 'last' or a whole number of steps, at least 1, got {quote(self.record)}") from None
        if self.executor is not None and not callable(getattr(self.executor, "submit", None)):
            got = type(self.executor).__name__
            raise ValueError(f"executor must have a method submit, as those of concurrent.futures have, got {got}")

    def list_recorded_steps(self, steps: int) -> tuple[int, ...]:
        """The numbers of the steps that are recorded."""
        if isinstance(self.record, str):
            return tuple(range(steps + 1)) if self.record == "all" else (steps,)
        return (*range(0, steps, self.record), steps)
