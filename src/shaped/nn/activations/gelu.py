"""The shaped GELU: a smooth activation, shaped as in Li, Nica and Roy 2022 ("The neural covariance SDE")."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from shaped.checks import SINGLE, keep, positive
from shaped.covariance import Matrix
from shaped.nn.activations.base import C_MINUS, Activation, Flow, ShapedActivation

PART = 0.25
"""In a part of a step the longest token's variance v grows at most to v/(1 - PART)."""
EXPLOSION = 0.9
"""A path whose variance would grow to v/(1 - EXPLOSION) or more in one step explodes in that step, or in the next."""


@dataclass(frozen=True)
class ScaledGELU(Activation):
    r"""$2s\,\text{gelu}(x/s) = x\,(1 + \text{erf}(x/(s\sqrt2)))$, with slope 1 at 0."""

    s: float

    def __call__(self, x: Tensor) -> Tensor:
        return torch.addcmul(x, x, torch.erf(x * (math.sqrt(0.5) / self.s)))

    def normaliser(self) -> float:
        r"""$1/c = 1 + \frac{2}{\pi}\left[\arcsin r + 2r/\sqrt{1 + 2u^2}\right]$ with $u = 1/s$, $r = u^2/(1 + u^2)$, by Stein's lemma."""
        square = self.s**-2
        r = square / (1.0 + square)
        return 1.0 / (1.0 + (2.0 / math.pi) * (math.asin(r) + 2.0 * r / math.sqrt(1.0 + 2.0 * square)))


class GELU(Activation):
    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x)

    def normaliser(self) -> float:
        return 4.0 * ScaledGELU(1.0).normaliser()


@dataclass(frozen=True)
class ShapedGELU(ShapedActivation):
    r"""$\sigma_s(x) = s\,(\phi(x/s) - \phi(0))/\phi'(0)$ for $\phi = \text{gelu}$ and $s = a\sqrt{n}$: the smaller a, the more bent.

    $\sigma_s(x) = x + a_2 x^2/\sqrt{n} + O(n^{-3/2})$ with $a_2 = \phi''(0)/(2\phi'(0)a) = \sqrt{2/\pi}/a$. There is no cubic term.

    A trainable module has $\frac{1 + \text{slope}}{2}\,x\,(1 + \text{erf}(ux/\sqrt2))$, where u goes from 1/s to 1 as the slope goes from 1
    to 0. At slope 1 this is $\sigma_s$, at slope 0, where `Recover` ends, the plain GELU. `Learn` trains the slope.
    """

    name: ClassVar[str] = "gelu"
    plain: ClassVar[Activation] = GELU()

    a: float = 1.0

    def __post_init__(self) -> None:
        keep(self, positive, "a", most=SINGLE)

    @classmethod
    def from_config(cls, c_minus: float) -> ShapedGELU:
        if c_minus != C_MINUS:
            raise ValueError(f"c_minus must be {C_MINUS}, its default, for {cls.name}, which has no use for it, got {c_minus}")
        return cls()

    def at(self, n: int) -> ScaledGELU:
        return ScaledGELU(self.a * math.sqrt(n))

    def flow(self, share: float) -> QuadraticGrowth:
        r"""The rate is $3a_2^2$."""
        return QuadraticGrowth(share * 6.0 / (math.pi * self.a**2))

    def start(self, n: int) -> float:
        return 1.0

    def apply(self, x: Tensor, slope: Tensor, n: int) -> Tensor:
        u = (1.0 - slope) + slope / (self.a * math.sqrt(n))  # not 1 - slope (1 - 1/s): a bfloat16 near 1 is off by per cents of 1/s
        straight = ((0.5 + 0.5 * slope) * x).to(x.dtype)
        return torch.addcmul(straight, straight, torch.erf((u * math.sqrt(0.5)).to(x.dtype) * x))


@dataclass(frozen=True)
class QuadraticGrowth(Flow):
    r"""The drift of an activation $x + a_2 x^2/\sqrt{n}$: $b = \text{rate}\cdot(K(V) - V)$ with
    $K^{\alpha\beta} = \tfrac13(V^{\alpha\alpha}V^{\beta\beta} + 2(V^{\alpha\beta})^2)$ and rate $3a_2^2$.

    $\mathbb{E}(g^\alpha g^\beta)^2 = 3K$ for $g \sim N(0, V)$, and the constant c subtracts its value at V = 1. A variance v follows
    $\dot v = \text{rate}\cdot v(v - 1)$: above 1 it grows, and explodes in finite time.
    """

    rate: float

    def drift(self, V: Matrix) -> Matrix:
        return self.rate * (square_kernel(V) - V)

    def move(self, V: Matrix, h: float) -> Matrix:
        r"""The flow, to fourth order. With $V = e^{-\text{rate}\,t}\,U$ and $\tau = 1 - e^{-\text{rate}\,t}$ it is $dU/d\tau = K(U)$.

        The Runge-Kutta steps of that equation add positive semi-definite matrices, since K maps the cone into itself.
        A variance v becomes $v/(1 - \tau v)$. Paths on which $\tau v$ is large take the step in parts, and those that explode become
        infinite, so that the engine stops them.
        """
        tau = -math.expm1(-self.rate * h)
        longest = V.diagonal(dim1=-2, dim2=-1).amax(-1)
        moved = runge_kutta(V, tau)
        fast = tau * longest > PART
        if fast.any():
            moved[fast] = move_in_parts(V[fast], tau)
        return moved.mul_(1.0 - tau)

    def longest(self) -> float:
        """A tenth of the time in which a short token's variance decays."""
        return 0.1 / self.rate if self.rate else math.inf

    def plus(self, other: Flow) -> Flow | None:
        return QuadraticGrowth(self.rate + other.rate) if isinstance(other, QuadraticGrowth) else None


def square_kernel(V: Matrix) -> Matrix:
    r"""$\tfrac13\mathbb{E}(g^\alpha g^\beta)^2 = \tfrac13(V^{\alpha\alpha}V^{\beta\beta} + 2(V^{\alpha\beta})^2)$ for $g \sim N(0, V)$."""
    v = V.diagonal(dim1=-2, dim2=-1)
    return (v[..., :, None] * v[..., None, :]).addcmul_(V, V, value=2.0).div_(3.0)


def runge_kutta(U: Matrix, tau: float | Float[Tensor, "*batch 1 1"]) -> Matrix:
    """A step of length tau of dU/dtau = K(U), of fourth order."""
    one = square_kernel(U)
    two = square_kernel(U + 0.5 * tau * one)
    three = square_kernel(U + 0.5 * tau * two)
    four = square_kernel(U + tau * three)
    return U + (one + 2.0 * two + 2.0 * three + four) * (tau / 6.0)


def move_in_parts(U: Float[Tensor, "batch m m"], tau: float) -> Float[Tensor, "batch m m"]:
    """The same in parts of length PART/v, v being the longest token's variance at the time."""
    left = U.new_full((len(U),), tau).masked_fill_(tau * U.diagonal(dim1=-2, dim2=-1).amax(-1) >= EXPLOSION, 0.0)
    U = torch.where((left > 0.0)[:, None, None], U, torch.inf)
    while (left > 0.0).any():
        part = torch.minimum(left, PART / U.diagonal(dim1=-2, dim2=-1).amax(-1))
        U = torch.where((part > 0.0)[:, None, None], runge_kutta(U, part[:, None, None]), U)
        left = left - part
    return U
