"""The terms that covariance SDEs are sums of. A layer lists its terms; the solver sees only terms.

A term has a drift b(V), a noise of covariance Sigma(V), and a `move`: one step of size h of the equation with only this term, of weak
order 1. A move multiplies a factor of V or adds positive semi-definite matrices, so it stays positive semi-definite for every h.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from shaped.covariance import Matrix, Point, lower_product, product
from shaped.randomness import Normals

Dense = Float[Tensor, "*batch p p"]


class Term(ABC):
    """A summand of a covariance SDE, with a drift, a noise and a step that stays positive semi-definite."""

    @abstractmethod
    def drift(self, V: Matrix) -> Matrix:
        """b(V)."""

    @abstractmethod
    def noise(self, point: Point, normals: Normals) -> Matrix:
        """One draw with covariance Sigma(V)."""

    @abstractmethod
    def tensor(self, V: Matrix) -> Float[Tensor, "*batch m m m m"]:
        """The covariance of the noise, entry [a, b, c, d] for the pair of entries (ab) and (cd) of V."""

    @abstractmethod
    def move(self, point: Point, h: float, normals: Normals) -> Point:
        """A step of size h that stays positive semi-definite."""

    @abstractmethod
    def longest(self, m: int) -> float:
        """The longest default step of the solver for m tokens, for every V."""

    def halved(self) -> Term:
        """The same term for half steps: it cuts a step h/2 into as many parts as this one cuts h."""
        return self

    def stopping_at(self, upper: float) -> Term:
        """The same term for paths that stop at this eigenvalue."""
        return self

    @abstractmethod
    def plus(self, other: Term) -> Term | None:
        """The sum of both as one term, or None if there is no such term."""

    def Sigma(self, V: Matrix) -> Dense:
        """The covariance of the noise's upper triangle, row by row."""
        rows, columns = torch.triu_indices(V.shape[-1], V.shape[-1], device=V.device)
        return self.tensor(V)[..., rows, columns, :, :][..., rows, columns]


def merge_terms(terms: Iterable[Term]) -> tuple[Term, ...]:
    """The same sum with as few terms as possible. Fewer terms need fewer random numbers and products."""
    kept: list[Term] = []
    for term in terms:
        for i, earlier in enumerate(kept):
            joint = earlier.plus(term)
            if joint is not None:
                kept[i] = joint
                break
        else:
            kept.append(term)
    return tuple(kept)


@dataclass(frozen=True)
class WeightNoise(Term):
    r"""The noise of Gaussian weights: $\Sigma = \text{scale}\cdot\Sigma_{\text{lin}}$, no drift (Thm. sde-resnet).

    $\Sigma_{\text{lin}}^{\alpha\beta,\delta\omega} = V^{\alpha\delta} V^{\beta\omega} + V^{\alpha\omega} V^{\beta\delta}$
    """

    scale: float
    fineness: float = 1.0
    """Factor of the longest step that is not cut into parts; below 1 in half steps."""

    def drift(self, V: Matrix) -> Matrix:
        return torch.zeros_like(V)

    def noise(self, point: Point, normals: Normals) -> Matrix:
        """L (G + Gᵀ) Lᵀ / sqrt(2): a root of Sigma_lin that costs O(m³), not O(m⁶)."""
        L = point.L
        half = product(product(L, normals.square(L)), L.mT)
        return math.sqrt(self.scale / 2) * (half + half.mT)

    def tensor(self, V: Matrix) -> Float[Tensor, "*batch m m m m"]:
        straight = torch.einsum("...ac,...bd->...abcd", V, V)
        return self.scale * (straight + straight.transpose(-1, -2))

    def move(self, point: Point, h: float, normals: Normals) -> Point:
        r"""$V' = L W L^\top$, where W has the first two moments of a Wishart matrix with $\nu$ degrees of freedom, divided by $\nu$.

        V' has the mean V and the covariance $\Sigma_{\text{lin}}(V)/\nu$, exactly, for any number of tokens. $W = T T^\top/\nu$, where T is
        Bartlett's factor with $a_i + b_i g$, g normal, in place of the root of a chi-squared number with $\nu - i$ degrees: squared, it has
        the same mean and variance. With $1/\nu = p/(1 + \tfrac32 p)$, $p = \text{scale}\cdot h$, also $\mathbb{E}\rho^2 = p - \tfrac32 p^2$
        of two orthogonal tokens after the step is right to second order.
        """
        L, m = point.L, point.V.shape[-1]
        parts = max(1, math.ceil(h / self.longest(m)))
        share = self.scale * h / parts
        share = share / (1.0 + 1.5 * share)  # 1/nu
        if share == 0.0:
            return point
        left = 1.0 - share * torch.arange(m, dtype=torch.float64, device="cpu")  # k/nu for k = nu - i degrees
        spread = share / (1.0 + (1.0 - share / left).sqrt())  # b²/nu, b² being the root of b⁴ - 2 k b² + k = 0
        centre, reach = ((left - spread).sqrt().to(L), spread.sqrt().to(L))
        for _ in range(parts):
            T = normals.triangles(L, m).mul_(math.sqrt(share))
            diagonal = T.diagonal(dim1=-2, dim2=-1)
            diagonal.mul_(reach / math.sqrt(share)).add_(centre)
            L = lower_product(L, T)
        return Point(root=L)

    def longest(self, m: int) -> float:
        r"""The longest step that is not cut into parts: $\nu \ge 20$ and $\nu \ge 2(m + 1)$. With $\nu$ near m, W is almost singular."""
        return self.fineness * min(0.05, 0.5 / (m + 1)) / self.scale if self.scale else math.inf

    def halved(self) -> WeightNoise:
        return replace(self, fineness=self.fineness / 2.0)

    def plus(self, other: Term) -> Term | None:
        return replace(self, scale=self.scale + other.scale) if isinstance(other, WeightNoise) else None
