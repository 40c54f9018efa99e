"""The shaped ReLU (Eq. resnet)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shaped.checks import SINGLE, finite, keep
from shaped.covariance import FEW, Matrix
from shaped.nn.activations.base import C_MINUS, Activation, Flow, ShapedActivation


def shaped_relu(x: Tensor, negative_slope: float | Tensor, positive_slope: float | Tensor = 1.0) -> Tensor:
    r"""$\sigma_s(x) = s_+ \max(x, 0) + s_- \min(x, 0)$ (Eq. resnet), in the precision of x."""
    if isinstance(negative_slope, Tensor) or isinstance(positive_slope, Tensor):
        # The bend, not the slope, is rounded to the precision of x: it is c/sqrt(n), and a bfloat16 near 1 is off by per cents of that.
        straight = x if isinstance(positive_slope, float) and positive_slope == 1.0 else (positive_slope * x).to(x.dtype)
        bend = negative_slope - positive_slope
        assert isinstance(bend, Tensor)
        return torch.addcmul(straight, bend.to(x.dtype), x.clamp(max=0.0))
    if positive_slope == 1.0:
        return torch.nn.functional.leaky_relu(x, negative_slope)
    if positive_slope == 0.0:
        return negative_slope * x.clamp(max=0.0)
    return positive_slope * torch.nn.functional.leaky_relu(x, negative_slope / positive_slope)


def he_constant(negative_slope: float, positive_slope: float = 1.0) -> float:
    r"""$c = 1/\mathbb{E}\,\sigma_s(g)^2 = 2/(s_+^2 + s_-^2)$ (Eq. resnet): keeps the variance of a layer's features."""
    if positive_slope == negative_slope == 0.0:
        raise ValueError("negative_slope and positive_slope must not both be 0: nothing would pass, got 0.0 and 0.0")
    return 2.0 / (positive_slope**2 + negative_slope**2)


@dataclass(frozen=True)
class LeakyReLU(Activation):
    """Two slopes, whatever the width."""

    negative_slope: float
    positive_slope: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return shaped_relu(x, self.negative_slope, self.positive_slope)

    def normaliser(self) -> float:
        return he_constant(self.negative_slope, self.positive_slope)


class ReLU(Activation):
    def __call__(self, x: Tensor) -> Tensor:
        return torch.relu(x)

    def normaliser(self) -> float:
        return he_constant(0.0)


@dataclass(frozen=True)
class ShapedReLU(ShapedActivation):
    r"""Slopes $s_\pm = 1 + c_\pm/\sqrt{n}$ (Eq. resnet)."""

    name: ClassVar[str] = "relu"
    plain: ClassVar[Activation] = ReLU()

    c_plus: float = 0.0
    c_minus: float = C_MINUS

    def __post_init__(self) -> None:
        keep(self, finite, "c_plus", "c_minus", most=SINGLE)

    @classmethod
    def from_config(cls, c_minus: float) -> ShapedReLU:
        return cls(0.0, c_minus)

    def at(self, n: int) -> LeakyReLU:
        return LeakyReLU(1.0 + self.c_minus / math.sqrt(n), 1.0 + self.c_plus / math.sqrt(n))

    def flow(self, share: float) -> ReLURelaxation:
        """Thm. sde-resnet. The rate is (c_plus - c_minus)²/4."""
        return ReLURelaxation(share * ((self.c_plus - self.c_minus) ** 2 / 4.0))

    def start(self, n: int) -> float:
        """The negative slope. The positive one must be 1: the plain ReLU has it, and the kernels know no other."""
        if self.c_plus != 0.0:
            raise ValueError(f"c_plus must be 0 in a trainable module, whose positive slope is 1, got {self.c_plus}")
        return self.at(n).negative_slope

    def apply(self, x: Tensor, slope: Tensor, n: int) -> Tensor:
        return shaped_relu(x, slope)


@dataclass(frozen=True)
class ReLURelaxation(Flow):
    r"""The drift of the shaped ReLU, as a relaxation of V towards the kernel of |x|.

    $b = \text{rate}\cdot(K(V) - V)$ with $K(V)^{\alpha\beta} = \mathbb{E}|g^\alpha||g^\beta|$, $g \sim N(0, V)$. This is
    $\nu(\rho^{\alpha\beta})\sqrt{V^{\alpha\alpha}V^{\beta\beta}}$ of Thm. sde-resnet, because
    $\nu(\rho) = \frac{(c_+-c_-)^2}{4}\,[\frac{2}{\pi}(\sqrt{1-\rho^2} + \rho\arcsin\rho) - \rho]$.
    """

    rate: float

    def drift(self, V: Matrix) -> Matrix:
        return self.rate * (absolute_kernel(V) - V)

    def move(self, V: Matrix, h: float) -> Matrix:
        r"""$V' = e^{-\text{rate}\,h}\,V + (1 - e^{-\text{rate}\,h})\,K(V)$, a mean of two positive semi-definite matrices.

        The arc-cosine map of a ReLU with slopes $1 + c_\pm\sqrt{h}$ is such a mean too, but its weight has a term in
        $h^{3/2}$ unless $c_+ = -c_-$, and with it the step is only of weak order 1/2 (docs/method.md).
        """
        return torch.lerp(V, absolute_kernel(V), -math.expm1(-self.rate * h))

    def longest(self) -> float:
        """A tenth of the time in which V relaxes: K(V) is taken at the start of the step."""
        return 0.1 / self.rate if self.rate else math.inf

    def plus(self, other: Flow) -> Flow | None:
        return ReLURelaxation(self.rate + other.rate) if isinstance(other, ReLURelaxation) else None


def absolute_kernel(V: Matrix) -> Matrix:
    r"""$K^{\alpha\beta} = \mathbb{E}|g^\alpha||g^\beta| = \frac{2}{\pi}(\sqrt{V^{\alpha\alpha}V^{\beta\beta} - (V^{\alpha\beta})^2}
    + V^{\alpha\beta}\arcsin\rho^{\alpha\beta})$ for $g \sim N(0, V)$."""
    length = V.diagonal(dim1=-2, dim2=-1).sqrt()
    if V.shape[-1] > FEW:
        K = _absolute_products(V, length[..., :, None] * length[..., None, :])
        K.diagonal(dim1=-2, dim2=-1).copy_(V.diagonal(dim1=-2, dim2=-1))
        return K
    K = V.clone()
    for a in range(1, V.shape[-1]):  # each pair once: arcsines take time
        K[..., a, :a] = K[..., :a, a] = _absolute_products(V[..., a, :a], length[..., a : a + 1] * length[..., :a])
    return K


def _absolute_products(covariance: Tensor, scale: Tensor) -> Tensor:
    """E|x||y| for normal x and y with this covariance, and this product of their standard deviations."""
    # 0/0 is a token of length zero: its row of K is 0 whatever rho is. The clamp removes only rounding.
    rho = (covariance / scale.clamp(min=torch.finfo(scale.dtype).tiny)).clamp_(-1.0, 1.0)
    return rho.asin().mul_(rho).add_(rho.square().neg_().add_(1.0).sqrt_()).mul_(scale * (2.0 / math.pi))
