"""The inputs of a step: its configuration, fixed for a compiled program, and its schedule, numbers for each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shaped.train.step.optimisers import Optimiser


@dataclass(frozen=True)
class StepConfig:
    """What the program of a step depends on beside shapes. Runs with the same configuration and shapes can share one `Stepper`."""

    device: torch.device
    half: bool = False
    compile: str = "off"
    graph: bool = False
    clips: bool = False
    attention: str = "auto"
    stream: torch.dtype = torch.float32
    chunk: int = 16
    optimiser: str = "adam"

    @classmethod
    def of(cls, settings: Any, world: int) -> StepConfig:
        """From settings, with each "auto" resolved for this machine and the number of processes."""
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if settings.device == "auto" else settings.device
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError("device must be cpu where there is no GPU, got cuda")
        gpu = kind == "cuda"
        if settings.graph == "on" and (not gpu or world > 1):
            raise ValueError(f"graph must be off or auto without a GPU or with several processes, got on for {kind} and {world}")
        half = gpu if settings.precision == "auto" else settings.precision == "bf16"
        return cls(
            device=torch.device(kind, torch.cuda.current_device()) if gpu else torch.device("cpu"),
            half=half,
            stream=torch.bfloat16 if half and settings.stream == "bf16" else torch.float32,
            compile=("blocks" if gpu else "off") if settings.compile == "auto" else settings.compile,
            graph=gpu and world == 1 and settings.graph != "off",
            clips=settings.clip > 0,
            attention=settings.attention,
            chunk=128 if gpu else 16,  # between chunks a GPU waits some milliseconds for the host
            optimiser=settings.optimiser,
        )


@dataclass(frozen=True)
class StepSchedule:
    """Numbers that change from step to step: learning rate, share of the shaping that is left; and the largest norm of the gradient.

    `factors` multiply the learning rate of a kind of parameters; 1 for a kind that is not there.
    """

    lr: Callable[[int], float]
    factors: dict[str, float]
    share: Callable[[int], float]
    clip: float = 0.0

    def row(self, step: int, kinds: list[str], optimiser: type[Optimiser]) -> list[float]:
        """The numbers of one step, as `unpack` takes them apart."""
        rates = [self.lr(step) * self.factors.get(kind, 1.0) for kind in kinds]
        return [*optimiser.scalars(step), self.share(step), self.clip, *rates]

    @staticmethod
    def unpack(row: torch.Tensor, kinds: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The optimiser's scalars, share, clip, and the learning rates by kind."""
        rates = len(row) - len(kinds)
        return row[: rates - 2], row[rates - 2], row[rates - 1], row[rates:]
