"""Feed-forward layers with the shaped ReLU: residual (Eq. resnet) and without skip connection (Eq. sde_mlp)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from shaped.covariance import Matrix, Point
from shaped.layers.base import Layer, check_residual
from shaped.layers.terms import Term, WeightNoise
from shaped.randomness import Normals


@dataclass(frozen=True)
class ReLURelaxation(Term):
    r"""The drift of the shaped ReLU, as a relaxation of V towards the kernel of |x|. It has no noise.

    $b = \text{rate}\cdot(K(V) - V)$ with $K(V)^{\alpha\beta} = \mathbb{E}|g^\alpha||g^\beta|$, $g \sim N(0, V)$. This is
    $\nu(\rho^{\alpha\beta})\sqrt{V^{\alpha\alpha}V^{\beta\beta}}$ of Thm. sde-resnet, because
    $\nu(\rho) = \frac{(c_+-c_-)^2}{4}\,[\frac{2}{\pi}(\sqrt{1-\rho^2} + \rho\arcsin\rho) - \rho]$.
    """

    rate: float

    def drift(self, V: Matrix) -> Matrix:
        return self.rate * (absolute_kernel(V) - V)

    def noise(self, point: Point, normals: Normals) -> Matrix:
        return torch.zeros_like(point.V)

    def tensor(self, V: Matrix) -> Float[Tensor, "*batch m m m m"]:
        m = V.shape[-1]
        return V.new_zeros(*V.shape, m, m)

    def move(self, point: Point, h: float, normals: Normals) -> Point:
        r"""$V' = e^{-\text{rate}\,h}\,V + (1 - e^{-\text{rate}\,h})\,K(V)$, a mean of two positive semi-definite matrices.

        The arc-cosine map of a ReLU with slopes $1 + c_\pm\sqrt{h}$ is such a mean too, but its weight has a term in
        $h^{3/2}$ unless $c_+ = -c_-$, and with it the step is only of weak order 1/2 (docs/method.md).
        """
        share = -math.expm1(-self.rate * h)
        return Point(matrix=torch.lerp(point.V, absolute_kernel(point.V), share))

    def plus(self, other: Term) -> Term | None:
        return ReLURelaxation(self.rate + other.rate) if isinstance(other, ReLURelaxation) else None


def absolute_kernel(V: Matrix) -> Matrix:
    r"""$K^{\alpha\beta} = \mathbb{E}|g^\alpha||g^\beta| = \frac{2}{\pi}(\sqrt{V^{\alpha\alpha}V^{\beta\beta} - (V^{\alpha\beta})^2}
    + V^{\alpha\beta}\arcsin\rho^{\alpha\beta})$ for $g \sim N(0, V)$."""
    length = V.diagonal(dim1=-2, dim2=-1).sqrt()
    scale = length[..., :, None] * length[..., None, :]
    # 0/0 is a token of length zero: its row of K is 0 whatever rho is. The clamp takes off rounding only.
    rho = (V / scale.clamp(min=torch.finfo(V.dtype).tiny)).clamp_(-1.0, 1.0)
    K = rho.asin().mul_(rho).add_(rho.square().neg_().add_(1.0).sqrt_())
    K.mul_(scale.mul_(2.0 / math.pi))
    K.diagonal(dim1=-2, dim2=-1).copy_(V.diagonal(dim1=-2, dim2=-1))
    return K


@dataclass(frozen=True)
class ShapedFeedForward(Layer):
    r"""$X' = \lambda X + \gamma\,\sigma_s(X W^{\text{pre}}/\sqrt{n})\sqrt{c/n}\,W^{\text{post}}$ (Eq. resnet).

    The shaped ReLU $\sigma_s$ has slopes $1 + c_\pm/\sqrt{n}$; the shortcut is $\lambda = \sqrt{1 - \gamma^2}$.
    """

    gamma: float
    c_plus: float = 0.0
    c_minus: float = -1.0

    def __post_init__(self) -> None:
        check_residual(self.gamma)
        check_slopes(self.c_plus, self.c_minus)

    def limit(self) -> tuple[Term, ...]:
        r"""Thm. sde-resnet: $b = \gamma^2 b_{\text{ReLU}}$, $\Sigma = 2\gamma^2\Sigma_{\text{lin}}$."""
        share = self.gamma**2
        return WeightNoise(2.0 * share), ReLURelaxation(share * relaxation_rate(self.c_plus, self.c_minus))


@dataclass(frozen=True)
class ShapedPerceptron(Layer):
    r"""$X' = \sigma_s(X)\sqrt{c/n}\,W$ (App. "Covariance SDE Framework"), slopes $1 + c_\pm/\sqrt{n}$, no skip connection."""

    c_plus: float = 0.0
    c_minus: float = -1.0

    def __post_init__(self) -> None:
        check_slopes(self.c_plus, self.c_minus)

    def limit(self) -> tuple[Term, ...]:
        r"""Eq. sde_mlp: $b = b_{\text{ReLU}}$, $\Sigma = \Sigma_{\text{lin}}$."""
        return WeightNoise(1.0), ReLURelaxation(relaxation_rate(self.c_plus, self.c_minus))


def relaxation_rate(c_plus: float, c_minus: float) -> float:
    r"""$(c_+ - c_-)^2/4$, the speed of the shaped ReLU's drift (see `ReLURelaxation`)."""
    return (c_plus - c_minus) ** 2 / 4.0


def check_slopes(c_plus: float, c_minus: float) -> None:
    for name, value in (("c_plus", c_plus), ("c_minus", c_minus)):
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
