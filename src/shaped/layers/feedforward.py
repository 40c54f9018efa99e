"""Feed-forward layers with the shaped ReLU: residual (Eq. resnet) and without skip connection (Eq. sde_mlp)."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shaped.checks import slope
from shaped.covariance import FEW, Matrix, Point, factor, gram
from shaped.layers.base import Factor, Layer, NoLimit, ResidualLayer, Sizes, Tokens, check_residual
from shaped.layers.terms import Term, WeightNoise
from shaped.nn.functional import he_constant, shaped_relu
from shaped.nn.networks import RandomFeedForward, RandomPerceptron, Residual
from shaped.randomness import Normals, Stream

Slopes = tuple[float, float]  # positive, negative


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

    def longest(self, m: int) -> float:
        """A tenth of the time in which V relaxes: K(V) is taken at the start of the step."""
        return 0.1 / self.rate if self.rate else math.inf

    def plus(self, other: Term) -> Term | None:
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
    # 0/0 is a token of length zero: its row of K is 0 whatever rho is. The clamp takes off rounding only.
    rho = (covariance / scale.clamp(min=torch.finfo(scale.dtype).tiny)).clamp_(-1.0, 1.0)
    return rho.asin().mul_(rho).add_(rho.square().neg_().add_(1.0).sqrt_()).mul_(scale * (2.0 / math.pi))


class FeedForward(ResidualLayer):
    r"""$f(X) = \sigma_s(X W^{\text{pre}}/\sqrt{n})\sqrt{c/n}\,W^{\text{post}}$ (Eq. resnet) for slopes that may depend on the width."""

    @abstractmethod
    def slopes(self, n: int) -> Slopes:
        """The slopes of the activation at width n."""

    def branch(self, L: Factor, sizes: Sizes, stream: Stream) -> tuple[Factor, ...]:
        return (factor(activation_gram(L, sizes.n, self.slopes(sizes.n), stream)),)

    def module(
        self, n: int, n_k: int | None = None, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None
    ) -> nn.Module:
        branch = RandomFeedForward(Sizes(n, n_k).n, *self.slopes(n), generator=generator, dtype=dtype)
        return Residual(branch, self.shortcut, self.gamma)


@dataclass(frozen=True)
class ShapedFeedForward(FeedForward):
    r"""$X' = \lambda X + \gamma\,\sigma_s(X W^{\text{pre}}/\sqrt{n})\sqrt{c/n}\,W^{\text{post}}$ (Eq. resnet).

    The shaped ReLU $\sigma_s$ has slopes $1 + c_\pm/\sqrt{n}$; the shortcut is $\lambda = \sqrt{1 - \gamma^2}$ unless `lam` is given.
    """

    gamma: float
    c_plus: float = 0.0
    c_minus: float = -1.0
    lam: float | None = None

    def __post_init__(self) -> None:
        check_residual(self.gamma, self.lam)
        slope("c_plus", self.c_plus)
        slope("c_minus", self.c_minus)

    def slopes(self, n: int) -> Slopes:
        return shaped_slopes(n, self.c_plus, self.c_minus)

    def limit(self) -> tuple[Term, ...]:
        r"""Thm. sde-resnet: $b = \gamma^2 b_{\text{ReLU}}$, $\Sigma = 2\gamma^2\Sigma_{\text{lin}}$."""
        self.check_shortcut()
        share = self.gamma**2
        return WeightNoise(2.0 * share), ReLURelaxation(share * relaxation_rate(self.c_plus, self.c_minus))


@dataclass(frozen=True)
class ReLUFeedForward(FeedForward):
    r"""The same layer with a ReLU that is not shaped: slopes 1 and `negative_slope`, whatever the width. It has no limit."""

    gamma: float
    negative_slope: float = 0.0
    lam: float | None = None

    def __post_init__(self) -> None:
        check_residual(self.gamma, self.lam)
        slope("negative_slope", self.negative_slope)

    def slopes(self, n: int) -> Slopes:
        return 1.0, self.negative_slope

    def limit(self) -> tuple[Term, ...]:
        raise NoLimit(
            f"{self!r} has no limit: the slopes 1 and {self.negative_slope:g} do not approach each other as n grows, so the "
            "kernel's change c·K1(rho) - rho is O(1)"
        )


@dataclass(frozen=True)
class ShapedPerceptron(Layer):
    r"""$X' = \sqrt{c}\,\sigma_s(X W/\sqrt{n})$, slopes $1 + c_\pm/\sqrt{n}$, no skip connection (App. "Covariance SDE Framework").

    The paper writes $X' = \sigma_s(X)\sqrt{c/n}\,W$: the same stack, cut before the activation. Cut after it, as here, the
    covariance alone determines the next one's law.
    """

    c_plus: float = 0.0
    c_minus: float = -1.0

    def __post_init__(self) -> None:
        slope("c_plus", self.c_plus)
        slope("c_minus", self.c_minus)

    def limit(self) -> tuple[Term, ...]:
        r"""Eq. sde_mlp: $b = b_{\text{ReLU}}$, $\Sigma = \Sigma_{\text{lin}}$."""
        return WeightNoise(1.0), ReLURelaxation(relaxation_rate(self.c_plus, self.c_minus))

    def slopes(self, n: int) -> Slopes:
        return shaped_slopes(n, self.c_plus, self.c_minus)

    def advance_tokens(self, X: Tokens, sizes: Sizes, stream: Stream) -> Tokens:
        L, (positive, negative) = factor(gram(X)), self.slopes(sizes.n)
        before = L @ stream.matrices(X, L.shape[-1], sizes.n)
        return math.sqrt(he_constant(negative, positive)) * shaped_relu(before, negative, positive)

    def advance_gram(self, point: Point, sizes: Sizes, stream: Stream) -> Point:
        return Point(matrix=activation_gram(point.L, sizes.n, self.slopes(sizes.n), stream))

    def module(
        self, n: int, n_k: int | None = None, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None
    ) -> nn.Module:
        return RandomPerceptron(Sizes(n, n_k).n, *self.slopes(n), generator=generator, dtype=dtype)


def activation_gram(L: Factor, n: int, slopes: Slopes, stream: Stream) -> Float[Tensor, "batch m m"]:
    r"""A draw of $\frac{c}{n} \sigma_s(h)\sigma_s(h)^\top$, $h = L Z$ with m x n normals Z: a hidden layer's Gram matrix."""
    positive, negative = slopes
    batch, m, k = L.shape
    K = L.new_empty(m, m, batch).permute(2, 0, 1) if L.stride(0) == 1 else L.new_empty(batch, m, m)
    # A few samples at a time, so that their features stay in the cache.
    few = max(1, (2**16 if L.device.type == "cpu" else 2**26) // (m * n))
    for first in range(0, batch, few):
        part = L[first : first + few].contiguous()
        features = shaped_relu(part @ stream.normal(len(part), k, n), negative, positive)
        K[first : first + few] = features @ features.mT
    return K.mul_(he_constant(negative, positive) / n)


def shaped_slopes(n: int, c_plus: float, c_minus: float) -> Slopes:
    r"""$s_\pm = 1 + c_\pm/\sqrt{n}$ (Eq. resnet)."""
    return 1.0 + c_plus / math.sqrt(n), 1.0 + c_minus / math.sqrt(n)


def relaxation_rate(c_plus: float, c_minus: float) -> float:
    r"""$(c_+ - c_-)^2/4$, the speed of the shaped ReLU's drift (see `ReLURelaxation`)."""
    return (c_plus - c_minus) ** 2 / 4.0
