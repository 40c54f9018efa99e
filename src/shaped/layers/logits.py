"""The term of attention: the effect of random logits on the covariance, for the mask of one head."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shaped.covariance import Matrix, Point, lower_product, match_layout, product, product_lower, weighted_mean
from shaped.layers.masks import Mask, Rows, resting_attention, same_mask
from shaped.layers.terms import Term
from shaped.randomness import Normals

STRIDE = 0.2
"""The largest mean relative change of a token's variance in one part of a step."""
MOST_PARTS = 16
"""The largest number of parts of a step. A path that needs more explodes in the next part."""


@dataclass(frozen=True, eq=False)
class LogitPerturbation(Term):
    r"""The effect of random logits of size $O(n^{-1/2})$ on the covariance, for attention centred at P, its value at zero logits.

    Let $N$ be the logits' limit, $\mathbb{E} N^{\alpha\delta} N^{\beta\omega} = V^{\alpha\beta} V^{\delta\omega}$ (Lemma mom-y), and
    $E = P \circ (N - (P \circ N) 11^\top)$ the first-order change of the softmax. Then, for Thm. sde-attention in its general form,
    $b = \text{rate}\,[\mathbb{E}\,E V E^\top + \tfrac12 (P \circ S_2) V + \tfrac12 V (P \circ S_2)^\top]$, and the noise is
    $\sqrt{\text{variance}}\,(E V + V E^\top)$.
    """

    mask: Mask = field(repr=False)
    rate: float
    variance: float

    def drift(self, V: Matrix) -> Matrix:
        change = MeanChange.at(self.mask, V)
        second = product(change.second, V)
        return self.rate * (change.squared * V + second + second.mT)

    def noise(self, point: Point, normals: Normals) -> Matrix:
        P = resting_attention(self.mask, point.V.shape[-1], point.V)
        half = product(first_order_change(P, point.L, normals), point.V)
        return math.sqrt(self.variance) * (half + half.mT)

    def tensor(self, V: Matrix) -> Float[Tensor, "*batch m m m m"]:
        r"""$\mathcal{A}$ of Thm. sde-attention, with the sums over $S_1$ carried out one index at a time."""
        P = resting_attention(self.mask, V.shape[-1], V).expand(V.shape[-2:])
        W = P @ V
        U = W @ P.mT
        # S1[a, k, c, j]: the covariance of the centred logits (a, k) and (c, j), without its factor V_ac.
        S1 = V[..., None, :, None, :] - W.mT[..., None, :, :, None] - W[..., :, None, None, :] + U[..., :, None, :, None]
        Z = P[:, :, None] * V[..., None, :, :]  # Z[a, k, b] = P_ak V_kb, so that (E V)_ab = sum_k (centred N)_ak Z_akb
        half = torch.einsum("...ac,...akb,...akcj,...cjd->...abcd", V, Z, S1, Z)
        half = half + half.transpose(-1, -2)
        return self.variance * (half + half.transpose(-3, -4))

    def move(self, point: Point, h: float, normals: Normals) -> Point:
        """A step of length h. The drift is cubic in V, so it is fast where V is large: such paths take the step in parts."""
        if self.rate == 0.0:
            return point
        change = MeanChange.at(self.mask, point.V)
        moved = self.stride(point, h, change, normals)
        fast = change.fast(self.rate * h)
        if len(fast):
            moved.V[fast] = self.move_in_parts(match_layout(point.V[fast], point.V), h, normals.fork())
        return moved

    def move_in_parts(self, V: Float[Tensor, "batch m m"], h: float, normals: Normals) -> Float[Tensor, "batch m m"]:
        """A step of length h, with a number of parts for each path.

        A part changes no token's variance by more than the share STRIDE, on average, but is no shorter than h/MOST_PARTS. While the
        variance grows by a share s, the drift grows by 2s. A stride, which takes the drift at its start, lags behind by about 1.4 s: 5/4 s
        where the drift's second part dominates, 3/2 s where the first does. So it is made longer than the part by that.
        """
        left = V.new_full((len(V),), h)
        moving = torch.arange(len(V), device=V.device)
        while len(moving):
            here = Point(matrix=match_layout(V[moving], V))
            change = MeanChange.at(self.mask, here.V)
            speed, growth = change.speed_and_growth()
            parts = torch.minimum(left[moving] * speed * (self.rate / STRIDE), left[moving] * (MOST_PARTS / h)).ceil_().clamp_(min=1.0)
            part = left[moving] / parts
            length = part * (1.0 + 1.4 * self.rate * part * growth)
            V[moving] = self.stride(here, length[:, None, None], change, normals).V
            left[moving] -= part
            moving = moving[parts > 1.0]
        return V

    def stride(self, point: Point, h: float | Float[Tensor, "batch 1 1"], change: MeanChange, normals: Normals) -> Point:
        r"""$V' = M V M^\top + h\,(\text{rate} - \text{variance})\,\mathbb{E}\,E V E^\top$, $M = I + \sqrt{h\,\text{variance}}\,E + h D$.

        $D = \tfrac12\,\text{rate}\cdot P \circ S_2$ brings in the drift's second part. The square of E, on average, and the last summand
        bring in its first part, $\text{rate}\cdot\mathbb{E}\,E V E^\top$. The rate is never below the variance (for a layer,
        variance/rate = gamma²/heads), so this is a sum of positive semi-definite matrices.
        """
        L, V = point.L, point.V
        E = first_order_change(change.P, L, normals)
        M = E.mul_((h * self.variance) ** 0.5).add_(change.second * (h * self.rate))
        moved = product_lower(M, L).add_(L)
        return Point(matrix=product(moved, moved.mT).addcmul_(V, change.squared * (h * (self.rate - self.variance))))

    def longest(self, m: int) -> float:
        return math.inf  # `move` chooses its parts by V

    def plus(self, other: Term) -> Term | None:
        if not isinstance(other, LogitPerturbation) or not same_mask(self.mask, other.mask):
            return None
        return LogitPerturbation(self.mask, self.rate + other.rate, self.variance + other.variance)


def softmax_derivative(P: Float[Tensor, "#rows m"], N: Float[Tensor, "*batch rows m"]) -> Float[Tensor, "*batch rows m"]:
    r"""$P \circ (N - (P \circ N) 11^\top)$: the derivative of a row-wise softmax with value P in the direction N."""
    return (N - weighted_mean(P, N)).mul_(P)


def first_order_change(P: Rows, L: Float[Tensor, "*batch m k"], normals: Normals) -> Matrix:
    r"""A draw of $E = P \circ (N - (P \circ N) 11^\top)$ with $N = L G L^\top$: the softmax's first order in the logits."""
    N = lower_product(L, lower_product(L, normals.square(L)).mT).mT
    return softmax_derivative(P, N)


@dataclass(frozen=True, eq=False)
class MeanChange:
    r"""The mean effect of random logits on the tokens, at one covariance V.

    Attributes:
        squared: Q with $\mathbb{E}\,E V E^\top = V \circ Q$.
        second: $\tfrac12 P \circ S_2$, the mean of the softmax's second order in the logits (Lemma mom-Softmax-taylor).
    """

    P: Rows
    V: Matrix
    squared: Float[Tensor, "*batch rows rows"]
    second: Matrix

    @classmethod
    def at(cls, mask: Mask, V: Matrix) -> MeanChange:
        r"""With W = PV and U = PVPᵀ: $Q = P(V{\circ}V)P^\top - (W{\circ}W)P^\top - P(W{\circ}W)^\top + U{\circ}U$ and
        $S_2^{\alpha\delta} = V^{\alpha\alpha}(C^{\alpha\delta} - \sum_\kappa P^{\alpha\kappa} C^{\alpha\kappa})$ with
        $C^{\alpha\delta} = V^{\delta\delta} - 2 W^{\alpha\delta}$, up to terms that do not depend on $\delta$: the softmax ignores them.
        """
        P, v = resting_attention(mask, V.shape[-1], V), V.diagonal(dim1=-2, dim2=-1)
        # K is V of the tokens less the first of them. What all keys share changes neither Q nor S2, but for the query's own length, and its
        # rounding would drown what is left of them when the tokens collapse.
        first = V[..., :1, :]
        K = (V - first).sub_(first.mT).add_(first[..., :1])
        W = product(K, P.mT).mT  # P K, since K is symmetric; for the one row of an unmasked P this order is several times faster
        U = product(W, P.mT)
        cross = product(W * W, P.mT)
        squared = product(product(K * K, P.mT).mT, P.mT) - cross - cross.mT + U * U
        C = torch.add(K.diagonal(dim1=-2, dim2=-1)[..., None, :], W, alpha=-2.0)
        return cls(P, V, squared, softmax_derivative(P, C) * (0.5 * v[..., :, None]))

    def fast(self, time: float) -> Int[Tensor, " fast"]:
        """The paths, by their numbers, on which a token's mean variance changes by more than STRIDE/8 in this time, for a rate of 1."""
        size = self.V.diagonal(dim1=-2, dim2=-1).amax(-1)
        perhaps = (size.square_() > STRIDE / (12.0 * time)).nonzero()[:, 0]  # the speed is below 3/2 of the squared largest variance
        if not len(perhaps):
            return perhaps
        speed, _ = MeanChange(self.P, self.V[perhaps], self.squared[perhaps], self.second[perhaps]).speed_and_growth()
        return perhaps[speed > STRIDE / (8.0 * time)]

    def speed_and_growth(self) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """The largest relative change of a token's mean variance in a unit of time, up or down, and the largest up; for a rate of 1."""
        own = self.squared.diagonal(dim1=-2, dim2=-1)
        second = (self.second * self.V).sum(-1).mul_(2.0) / self.V.diagonal(dim1=-2, dim2=-1)
        second = second.nan_to_num_(0.0)  # a token of length zero
        return (own + second.abs()).amax(-1), (own + second).amax(-1).clamp_(min=0.0)
