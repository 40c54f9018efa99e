"""Process: a Markov chain of covariances, one step at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from shaped.covariance import Point
from shaped.randomness import Stream

S = TypeVar("S")


class Process(ABC, Generic[S]):
    """What `solve` and `propagate` hand to the engine. S is the state of a block of paths."""

    kind: ClassVar[str]
    """Its name. Processes of different kinds draw different random numbers from the same seed."""
    together: ClassVar[int] = 1
    """The number of paths in a block is a multiple of this."""

    @abstractmethod
    def start(self, V0: Float[Tensor, "batch m m"], stream: Stream) -> S: ...

    @abstractmethod
    def step(self, state: S, stream: Stream) -> tuple[S, Bool[Tensor, " batch"] | None]:
        """The next state, and the paths on which an event happened that is to be counted (None: on no path)."""

    @abstractmethod
    def covariance(self, state: S) -> Float[Tensor, "batch m m"]: ...

    @abstractmethod
    def pack(self, state: S) -> Float[Tensor, "batch m k"]:
        """The state as one tensor."""

    @abstractmethod
    def unpack(self, packed: Float[Tensor, "batch m k"]) -> S:
        """The state of such a tensor."""

    def select(self, choice: Bool[Tensor, " batch"], yes: S, no: S) -> S:
        """The paths of `yes` where `choice` holds, those of `no` elsewhere."""
        return self.unpack(torch.where(choice[:, None, None], self.pack(yes), self.pack(no)))

    def is_capturable(self, V0: Float[Tensor, "batch m m"]) -> bool:
        """Can a CUDA graph hold a step? Then a step reads nothing back to the host."""
        return False

    def count_entries(self, m: int) -> int:
        """The size of a path's state, in numbers. The larger it is, the fewer samples a block has."""
        return m**2


class PointProcess(Process[Point]):
    """A process whose state is the covariance itself."""

    def start(self, V0: Float[Tensor, "batch m m"], stream: Stream) -> Point:
        return Point(matrix=V0)

    def covariance(self, state: Point) -> Float[Tensor, "batch m m"]:
        return state.V

    def pack(self, state: Point) -> Float[Tensor, "batch m m"]:
        return state.V

    def unpack(self, packed: Float[Tensor, "batch m m"]) -> Point:
        return Point(matrix=packed)
