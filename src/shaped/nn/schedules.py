"""How the shaping changes in training: Fixed, Learn, Recover (App. "Preliminary Experiments")."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import nn


class Shapeable(nn.Module):
    """A module whose activation or attention is shaped: 1 is the theory's shape, 0 the plain softmax or ReLU."""

    def set_shaping(self, share: float) -> None:
        raise TypeError(f"{type(self).__name__} does not say what its shaping is")


class Schedule(ABC):
    """What becomes of gamma1, gamma2 and the negative slope."""

    learns: ClassVar[bool]
    """Are they trained, as parameters?"""

    @abstractmethod
    def share(self, step: int) -> float:
        """The share of the initial shaping that is left at a step."""

    def apply(self, model: nn.Module, step: int) -> None:
        """Sets the shaping of every module of the model for this step. Nothing to do for what is trained."""
        if not self.learns:
            for module in model.modules():
                if isinstance(module, Shapeable):
                    module.set_shaping(self.share(step))


@dataclass(frozen=True)
class Fixed(Schedule):
    """The shaping stays as it is at initialisation."""

    learns: ClassVar[bool] = False

    def share(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Learn(Schedule):
    """gamma1, gamma2 and the negative slope are trained."""

    learns: ClassVar[bool] = True

    def share(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Recover(Schedule):
    """The shaping goes linearly to 0 in the first `steps` steps: what is left is a vanilla Transformer without LayerNorm."""

    steps: int = 4000
    learns: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    def share(self, step: int) -> float:
        return max(0.0, 1.0 - step / self.steps)
