"""Optimisers on flat vectors of parameters. A new one is a class here and a line in OPTIMISERS."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor


class Optimiser(ABC):
    about: ClassVar[str]
    """A few words for the command's help."""
    state: ClassVar[tuple[str, ...]]
    """Names of its state vectors, each as long as the values. Checkpoints keep them under these names."""

    @staticmethod
    @abstractmethod
    def scalars(step: int) -> list[float]:
        """Numbers that depend on the step alone, computed on the host; the same count for every step."""

    @staticmethod
    @abstractmethod
    def update(
        values: Tensor,
        state: tuple[Tensor, ...],
        gradients: Tensor,
        working: Tensor | None,
        factor: Tensor,
        lr: Tensor,
        scalars: Tensor,
        alive: Tensor | None,
    ) -> None:
        """A step in place; nothing changes if `alive` is False. May be compiled: no branches on values of tensors.

        Args:
            gradients: perhaps bfloat16; `factor` multiplies them (clipping).
            working: the bfloat16 copy of the values to renew, if there is one.
        """


class Adam(Optimiser):
    """Kingma and Ba 2015."""

    about = "Adam with betas 0.9 and 0.999"
    state = ("first", "second")  # moments
    BETAS, EPSILON = (0.9, 0.999), 1e-8

    @staticmethod
    def scalars(step: int) -> list[float]:
        """The bias corrections, 1 - beta^t, of both moments."""
        return [1.0 - beta ** (step + 1) for beta in Adam.BETAS]

    @staticmethod
    def update(
        values: Tensor,
        state: tuple[Tensor, ...],
        gradients: Tensor,
        working: Tensor | None,
        factor: Tensor,
        lr: Tensor,
        scalars: Tensor,
        alive: Tensor | None,
    ) -> None:
        first, second = state
        beta1, beta2 = Adam.BETAS
        gradients = gradients.float() * factor
        mean = first + (gradients - first) * (1 - beta1)
        square = second * beta2 + gradients * gradients * (1 - beta2)
        moved = values - lr * (mean / scalars[0]) / ((square / scalars[1]).sqrt() + Adam.EPSILON)
        if alive is not None:
            mean, square, moved = torch.where(alive, mean, first), torch.where(alive, square, second), torch.where(alive, moved, values)
        first.copy_(mean)
        second.copy_(square)
        values.copy_(moved)
        if working is not None:
            working.copy_(moved)


OPTIMISERS: dict[str, type[Optimiser]] = {"adam": Adam}
