"""How the shaping changes in training: Fixed, Learn, Recover (App. "Preliminary Experiments")."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from shaped.checks import keep, quote, whole_number


class Shapeable(nn.Module, ABC):
    """A module whose activation or attention is shaped: 1 is the theory's shape, 0 the plain softmax or activation."""

    @abstractmethod
    def scalars(self) -> tuple[Tensor, ...]:
        """The gains that shape this module."""

    @abstractmethod
    def set_shaping(self, share: float) -> None:
        """Sets the gains to this share of their initial values."""

    def reset_parameters(self) -> None:
        self.set_shaping(1.0)


class Schedule(ABC):
    """The shaping in training: gamma1, gamma2 and the activation's slope are fixed, trained (Learn) or annealed to 0 (Recover)."""

    about: ClassVar[str]
    """A few words for the commands' help."""
    learns: ClassVar[bool]
    """Are they trained, as parameters?"""

    @abstractmethod
    def share(self, step: int) -> float:
        """The share of the initial shaping that is left at a step."""

    def apply(self, model: nn.Module, step: int) -> None:
        """Sets the shaping of every module of the model for this step, before its forward pass. Trained gains do not change."""
        step = whole_number("step", step, least=0)  # of nan the share would be 0: no shaping, in silence
        shapeable = [module for module in model.modules() if isinstance(module, Shapeable)]
        if not shapeable and not isinstance(self, Fixed):
            raise ValueError(
                f"model must have gains that {self!r} can change, got {type(model).__name__} without any: make it with a schedule, or, if "
                "it is a Hugging Face model, call shaped.hf.shape(model) first"
            )
        if self.learns:
            constants = {id(buffer) for module in shapeable for buffer in module.buffers(recurse=False)}
            scalars = [gain for module in shapeable for gain in module.scalars()]
            if scalars and all(id(gain) in constants for gain in scalars):
                raise ValueError(
                    f"schedule must be the one that the model was made with, whose shaping is not trained, got {self!r}; shape a stock "
                    "Hugging Face model by shaped.hf.shape(model, learn=True)"
                )
            return
        if any(gain.requires_grad for module in shapeable for gain in module.scalars()):
            raise ValueError(f"schedule must be the one that the model was made with, which trains its shaping, got {self!r}")
        for module in shapeable:
            module.set_shaping(self.share(step))


def check_schedule(schedule: Schedule | None) -> Schedule:
    """The schedule, or Fixed() where none is given."""
    if schedule is not None and not isinstance(schedule, Schedule):
        raise ValueError(f"schedule must be Fixed(), Learn() or Recover(steps), got {quote(schedule)}")
    return schedule or Fixed()


@dataclass(frozen=True)
class Fixed(Schedule):
    """The shaping stays as it is at initialisation."""

    about: ClassVar[str] = "stays as it is at the start"
    learns: ClassVar[bool] = False

    def share(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Learn(Schedule):
    """gamma1, gamma2 and the activation's slope are trained."""

    about: ClassVar[str] = "trained"
    learns: ClassVar[bool] = True

    def share(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Recover(Schedule):
    """The shaping goes linearly to 0 in the first `steps` steps: what is left is a vanilla Transformer without LayerNorm."""

    steps: int = 4000
    about: ClassVar[str] = "annealed to 0"
    learns: ClassVar[bool] = False

    def __post_init__(self) -> None:
        keep(self, whole_number, "steps")

    def share(self, step: int) -> float:
        return min(1.0, max(0.0, 1.0 - step / self.steps))


SCHEDULES: dict[str, type[Schedule]] = {"fixed": Fixed, "learn": Learn, "recover": Recover}
