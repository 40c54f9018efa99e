"""Batches are functions of (seed, step) alone: a resumed run, two processes or another device see the same ones."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from shaped.checks import whole_number


class Batches(ABC):
    """Examples by number, shuffled anew each epoch. A subclass turns numbers into tensors.

    Args:
        count: number of examples.
        batch: examples of a step, over all processes.
        rank, world: this process takes the rank-th part of each batch.
    """

    def __init__(self, count: int, *, batch: int, seed: int, rank: int = 0, world: int = 1, device: torch.device | str = "cpu"):
        if count < whole_number("batch", batch):
            raise ValueError(f"batch must be at most the number of rows, {count}, got {batch}")
        if batch % world:
            raise ValueError(f"batch must be a multiple of the number of processes, {world}, got {batch}")
        self.count, self.batch, self.seed, self.device = count, batch, seed, torch.device(device)
        self.steps_an_epoch = count // batch  # an epoch leaves out the last few examples that fill no batch; other ones each time
        self.slots = torch.arange(rank * batch // world, (rank + 1) * batch // world, device=device)
        self._epoch: tuple[int, np.ndarray] | None = None

    def numbers(self, step: int) -> np.ndarray:
        """The numbers of the examples in the batch of a step, over all processes."""
        epoch, place = divmod(step, self.steps_an_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.count)
        return self._epoch[1][place * self.batch : (place + 1) * self.batch]

    def select(self, first: int, count: int) -> Tensor:
        """The numbers of this process's examples in `count` steps from `first` on, [count, examples]."""
        numbers = np.stack([self.numbers(step) for step in range(first, first + count)])
        return torch.from_numpy(numbers).to(self.device)[:, self.slots]

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """All sizes of a batch. Runs with the same sizes can share a compiled step."""

    @abstractmethod
    def chunk(self, first: int, count: int) -> tuple[Tensor, ...]:
        """The batches of `count` steps from `first` on: what the loss takes, each with a leading dimension `count`."""


def load_rows(rows: np.ndarray, device: torch.device | str) -> Tensor:
    """All rows on the device, so that a step needs nothing from the host. As int32, since few operations take uint16."""
    return torch.from_numpy(np.asarray(rows).astype(np.int32)).to(device)
