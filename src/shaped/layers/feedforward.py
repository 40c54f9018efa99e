"""Feed-forward layers with a shaped activation: residual (Eq. resnet) and without skip connection (Eq. sde_mlp)."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shaped.checks import check_slope, keep
from shaped.covariance import Matrix, Point, factor, gram
from shaped.layers.base import Factor, Layer, NoLimit, ResidualLayer, Sizes, Tokens, count_at_once, keep_weights
from shaped.layers.terms import Term, WeightNoise
from shaped.nn.activations import Activation, Flow, LeakyReLU, ShapedActivation, ShapedReLU, check_activation
from shaped.nn.networks import RandomFeedForward, RandomPerceptron, Residual
from shaped.randomness import Normals, Stream


@dataclass(frozen=True)
class ActivationDrift(Term):
    """The drift of an activation. It has no noise."""

    flow: Flow

    def drift(self, V: Matrix) -> Matrix:
        return self.flow.drift(V)

    def noise(self, point: Point, normals: Normals) -> Matrix:
        return torch.zeros_like(point.V)

    def tensor(self, V: Matrix) -> Float[Tensor, "*batch m m m m"]:
        m = V.shape[-1]
        return V.new_zeros(*V.shape, m, m)

    def move(self, point: Point, h: float, normals: Normals) -> Point:
        return Point(matrix=self.flow.move(point.V, h))

    def longest(self, m: int) -> float:
        return self.flow.longest()

    def plus(self, other: Term) -> Term | None:
        joint = self.flow.plus(other.flow) if isinstance(other, ActivationDrift) else None
        return None if joint is None else ActivationDrift(joint)


class FeedForward(ResidualLayer):
    r"""$f(X) = \sigma(X W^{\text{pre}}/\sqrt{n})\sqrt{c/n}\,W^{\text{post}}$ (Eq. resnet). The activation may depend on the width."""

    @abstractmethod
    def activation_at(self, n: int) -> Activation:
        """The activation at width n."""

    def branch(self, L: Factor, sizes: Sizes, stream: Stream) -> tuple[Factor, ...]:
        return (factor(activation_gram(L, sizes.n, self.activation_at(sizes.n), stream)),)

    def module(
        self, n: int, n_k: int | None = None, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None
    ) -> nn.Module:
        branch = RandomFeedForward(Sizes(n, n_k).n, self.activation_at(n), generator=generator, dtype=dtype)
        return Residual(branch, self.shortcut, self.gamma)


class Shaped:
    """A layer with a shaped activation: the ReLU of `c_plus` and `c_minus`, or the `activation` that is given."""

    c_plus: float
    c_minus: float
    activation: ShapedActivation | None

    @property
    def shape(self) -> ShapedActivation:
        return ShapedReLU(self.c_plus, self.c_minus) if self.activation is None else self.activation

    def activation_at(self, n: int) -> Activation:
        return self.shape.at(n)

    def check_shape(self) -> None:
        keep(self, check_slope, "c_plus", "c_minus")
        if self.activation is None:
            return
        check_activation(self.activation)
        if (self.c_plus, self.c_minus) != (0.0, -1.0):
            raise ValueError(f"c_plus and c_minus must be left out beside an activation, got {self.c_plus:g} and {self.c_minus:g}")

    def __repr__(self) -> str:
        """The ReLU's slopes or the other activation, not both."""
        hidden = ("activation",) if self.activation is None else ("c_plus", "c_minus")
        shown = (f"{entry.name}={getattr(self, entry.name)!r}" for entry in fields(cast(Any, self)) if entry.name not in hidden)
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class ShapedFeedForward(Shaped, FeedForward):
    r"""$X' = \lambda X + \gamma\,\sigma_s(X W^{\text{pre}}/\sqrt{n})\sqrt{c/n}\,W^{\text{post}}$ (Eq. resnet).

    The shaped ReLU $\sigma_s$ has slopes $1 + c_\pm/\sqrt{n}$; `activation` replaces it by another shaped activation. The shortcut is
    $\lambda = \sqrt{1 - \gamma^2}$ unless `lam` is given.
    """

    gamma: float
    c_plus: float = 0.0
    c_minus: float = -1.0
    lam: float | None = None
    activation: ShapedActivation | None = None

    def __post_init__(self) -> None:
        keep_weights(self)
        self.check_shape()

    def limit(self) -> tuple[Term, ...]:
        r"""Thm. sde-resnet: $b = \gamma^2 b_{\text{activation}}$, $\Sigma = 2\gamma^2\Sigma_{\text{lin}}$."""
        self.check_shortcut()
        share = self.gamma**2
        return WeightNoise(2.0 * share), ActivationDrift(self.shape.flow(share))


@dataclass(frozen=True)
class ReLUFeedForward(FeedForward):
    r"""The same layer with a ReLU that is not shaped: slopes 1 and `negative_slope`, whatever the width. It has no limit."""

    gamma: float
    negative_slope: float = 0.0
    lam: float | None = None

    def __post_init__(self) -> None:
        keep_weights(self)
        keep(self, check_slope, "negative_slope")

    def activation_at(self, n: int) -> Activation:
        return LeakyReLU(self.negative_slope)

    def limit(self) -> tuple[Term, ...]:
        raise NoLimit(
            f"{self!r} has no limit: the slopes 1 and {self.negative_slope:g} do not approach each other as n grows, so the "
            "kernel's change c·K1(rho) - rho is O(1)"
        )


@dataclass(frozen=True, repr=False)
class ShapedPerceptron(Shaped, Layer):
    r"""$X' = \sqrt{c}\,\sigma_s(X W/\sqrt{n})$, no skip connection (App. "Covariance SDE Framework").

    The shaped ReLU $\sigma_s$ has slopes $1 + c_\pm/\sqrt{n}$; `activation` replaces it by another shaped activation.

    The paper writes $X' = \sigma_s(X)\sqrt{c/n}\,W$: the same stack, cut before the activation. Cut after it, as here, the
    covariance determines the law of the next one.
    """

    c_plus: float = 0.0
    c_minus: float = -1.0
    activation: ShapedActivation | None = None

    def __post_init__(self) -> None:
        self.check_shape()

    def limit(self) -> tuple[Term, ...]:
        r"""Eq. sde_mlp: $b = b_{\text{activation}}$, $\Sigma = \Sigma_{\text{lin}}$."""
        return WeightNoise(1.0), ActivationDrift(self.shape.flow(1.0))

    def advance_tokens(self, X: Tokens, sizes: Sizes, stream: Stream) -> Tokens:
        L, activation = factor(gram(X)), self.activation_at(sizes.n)
        before = L @ stream.matrices(X, L.shape[-1], sizes.n)
        return math.sqrt(activation.normaliser()) * activation(before)

    def advance_gram(self, point: Point, sizes: Sizes, stream: Stream) -> Point:
        return Point(matrix=activation_gram(point.L, sizes.n, self.activation_at(sizes.n), stream))

    def module(
        self, n: int, n_k: int | None = None, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None
    ) -> nn.Module:
        return RandomPerceptron(Sizes(n, n_k).n, self.activation_at(n), generator=generator, dtype=dtype)


def activation_gram(L: Factor, n: int, activation: Activation, stream: Stream) -> Float[Tensor, "batch m m"]:
    r"""A draw of $\frac{c}{n} \sigma(h)\sigma(h)^\top$, $h = L Z$ with m x n normals Z: a hidden layer's Gram matrix."""
    batch, m, k = L.shape
    K = L.new_empty(m, m, batch).permute(2, 0, 1) if L.stride(0) == 1 else L.new_empty(batch, m, m)
    few = max(1, count_at_once(L.device) // (m * n))
    for first in range(0, batch, few):
        part = L[first : first + few].contiguous()
        features = activation(part @ stream.normal(len(part), k, n))
        K[first : first + few] = features @ features.mT
    return K.mul_(activation.normaliser() / n)
