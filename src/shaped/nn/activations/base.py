"""What every activation offers to the rest of the package: to random networks, to their limit and to trainable modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from shaped.covariance import Matrix

C_MINUS = -1.0  # the default of configs and settings


class Activation(ABC):
    """A function of single features, without anything to train."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def normaliser(self) -> float:
        r"""$c = 1/\mathbb{E}\,\sigma(g)^2$ for a standard normal g: it keeps the variance of a layer's features (Eq. resnet)."""


class Flow(ABC):
    r"""The deterministic change of the covariance by an activation in the limit: $dV = b(V)\,dt$.

    It must not leave the positive cone at any step size.
    """

    @abstractmethod
    def drift(self, V: Matrix) -> Matrix:
        """b(V)."""

    @abstractmethod
    def move(self, V: Matrix, h: float) -> Matrix:
        """V after a step of length h, correct to first order, positive semi-definite for any h."""

    @abstractmethod
    def longest(self) -> float:
        """The longest step that the solver should choose by itself."""

    @abstractmethod
    def plus(self, other: Flow) -> Flow | None:
        """One flow with the sum of both drifts, or None where there is no such flow."""


class ShapedActivation(ABC):
    r"""An activation $\sigma_s$ that tends to the identity as the width n grows. One object serves every face of a layer.

    Random networks use `at`, the covariance SDE uses `flow`, and trainable modules use `start`, `apply` and `plain`.
    """

    name: ClassVar[str]
    """Its name in configs and settings."""
    plain: ClassVar[Activation]
    """The activation without shaping, with which `Recover` ends."""

    @classmethod
    @abstractmethod
    def from_config(cls, c_minus: float) -> ShapedActivation:
        """The activation that a config describes. `c_minus` is for the ReLU; others refuse any value but C_MINUS."""

    @abstractmethod
    def at(self, n: int) -> Activation:
        """The function at width n."""

    @abstractmethod
    def flow(self, share: float) -> Flow:
        """The drift of a perceptron with this activation (Eq. sde_mlp), times `share`."""

    @abstractmethod
    def start(self, n: int) -> float:
        """Where a trainable module's `slope` starts. The mean slope at 0 is (1 + slope)/2: about 1 when shaped, 1/2 when plain."""

    @abstractmethod
    def apply(self, x: Tensor, slope: Tensor, n: int) -> Tensor:
        """The function for a slope that may be trained: that of `at(n)` where the slope starts, `plain` at slope 0."""
