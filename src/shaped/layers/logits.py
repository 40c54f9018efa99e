"""The term of attention: the effect of random logits on the covariance, for the mask of one head.

The logits' covariance is made of a kernel K of the tokens: their covariance V, or with QK-norm their correlations.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shaped.covariance import (
    Matrix,
    Point,
    exceeds,
    inverse_length,
    largest_safe,
    lower_product,
    match_layout,
    product,
    product_lower,
    running_means,
    weighted_mean,
)
from shaped.layers.masks import Mask, resting_attention, same_mask
from shaped.layers.rope import Rope, lag_matrix, lag_modes
from shaped.layers.terms import Term
from shaped.randomness import Normals

STRIDE, NOISE = 0.2, 0.03
"""The largest mean relative change of a token's variance in one part of a step, and the largest variance of that change."""
NO_RETURN, SURE = 1e-4, 16.0
"""A path explodes if it comes back to where a step has one part with less than this probability, and has so many parts of time left."""
FAR = 64.0
"""How many times longer, squared, a token must be than the shortest to be far longer."""
MOST_PARTS = 2**14
"""Parts after which a path has exploded, whatever that probability is: only a path that hardly drifts takes so many."""


@dataclass(frozen=True, eq=False)
class LogitPerturbation(Term):
    r"""The effect of random logits of size $O(n^{-1/2})$ on the covariance, for attention centred at P, its value at zero logits.

    Let $N$ be the logits' limit, $\mathbb{E} N^{\alpha\delta} N^{\beta\omega} = V^{\alpha\beta} V^{\delta\omega}$ (Lemma mom-y), and
    $E = P \circ (N - (P \circ N) 11^\top)$ the first-order change of the softmax. Then, for Thm. sde-attention in its general form,
    $b = \text{rate}\,[\mathbb{E}\,E V E^\top + \tfrac12 (P \circ S_2) V + \tfrac12 V (P \circ S_2)^\top]$, and the noise is
    $\sqrt{\text{variance}}\,(E V + V E^\top)$.

    Beyond the paper,
    $\mathbb{E} N^{\alpha\delta} N^{\beta\omega} = K^{\alpha\beta} K^{\delta\omega}\,\kappa((\alpha-\delta) - (\beta-\omega))$: with QK-norm
    K is the correlation $\rho$ in place of V, and with RoPE $\kappa$ is the similarity of two lags (`lag_similarity`), else 1.
    """

    mask: Mask = field(repr=False)
    rate: float
    variance: float
    qk_norm: bool = False
    rope: Rope = None
    ceiling: float = field(default=math.inf, repr=False)
    """The largest eigenvalue at which a path stops, also between two parts of a step."""

    def drift(self, V: Matrix) -> Matrix:
        change = self.mean_change(V)
        second = product(change.second, V)
        return self.rate * (change.squared * change.kernel + second + second.mT)

    def noise(self, point: Point, normals: Normals) -> Matrix:
        half = product(self.first_order_change(point, normals), point.V)
        return math.sqrt(self.variance) * (half + half.mT)

    def tensor(self, V: Matrix) -> Float[Tensor, "*batch m m m m"]:
        r"""$\mathcal{A}$ of Thm. sde-attention, with the sums over $S_1$ carried out one index at a time."""
        P = resting_attention(self.mask, V.shape[-1], V).expand(V.shape[-2:])
        K = self.kernel(V)
        S1 = reduce(add, (centred_covariance(P, K, mode) for mode in self.modes(V)))
        Z = P[:, :, None] * V[..., None, :, :]  # Z[a, k, b] = P_ak V_kb, so that (E V)_ab = sum_k (centred N)_ak Z_akb
        half = torch.einsum("...ac,...akb,...akcj,...cjd->...abcd", K, Z, S1, Z)
        half = half + half.transpose(-1, -2)
        return self.variance * (half + half.transpose(-3, -4))

    def kernel(self, V: Matrix) -> Matrix:
        """K: what the logits see of the tokens."""
        if not self.qk_norm:
            return V
        inverse = inverse_length(V.diagonal(dim1=-2, dim2=-1))
        return V * inverse[..., :, None] * inverse[..., None, :]

    def modes(self, like: Tensor) -> Float[Tensor, "modes rows columns"]:
        r"""Functions of the lag, $c_r^{\alpha\beta}$, with $N = \sum_r c_r \circ N_r$ for independent logits $N_r$ without positions."""
        return like.new_ones(1, 1, 1) if self.rope is None else lag_modes(self.rope, like.shape[-1]).to(like)

    def first_order_change(self, point: Point, normals: Normals) -> Matrix:
        r"""A draw of $E = P \circ (N - (P \circ N) 11^\top)$ with $N = \sum_r c_r \circ (L G_r L^\top)$: the softmax's first order in the
        logits. With QK-norm the rows of L have length 1."""
        L = point.L
        P = resting_attention(self.mask, L.shape[-1], L)
        if self.qk_norm:
            L = L * inverse_length(point.V.diagonal(dim1=-2, dim2=-1))[..., None]

        def draw() -> Matrix:
            return lower_product(L, lower_product(L, normals.square(L)).mT).mT

        N = draw() if self.rope is None else reduce(add, (mode * draw() for mode in self.modes(L)))
        return softmax_derivative(P, N)

    def mean_change(self, V: Matrix) -> MeanChange:
        r"""$Q = P(K{\circ}V)P^\top - X - X^\top + (P K P^\top){\circ}(PVP^\top)$ with $X = ((P K){\circ}(PV))\,P^\top$.

        With RoPE $\kappa((\alpha-\delta) - (\beta-\omega)) = \sum_r c_r(\alpha-\beta)\,c_r(\delta-\omega)$: the first product, X and
        $P K P^\top$ are sums over the modes, each of $c_r \circ K$ in place of K and times $c_r$.

        With $J = K \circ \kappa(\alpha - \beta)$
        $S_2^{\alpha\delta} = K^{\alpha\alpha}(C^{\alpha\delta} - \sum_\kappa P^{\alpha\kappa} C^{\alpha\kappa})$ with
        $C^{\alpha\delta} = J^{\delta\delta} - 2 (PJ)^{\alpha\delta}$, up to terms that do not depend on $\delta$: the softmax ignores them.
        """
        P, kernel = resting_attention(self.mask, V.shape[-1], V), self.kernel(V)

        def average(X: Matrix) -> Matrix:
            """X Pᵀ. For the one row of an unmasked P this order is several times faster than P X."""
            return running_means(X) if isinstance(self.mask, str) else product(X, P.mT)

        # The rows of E add up to 0, so tokens and keys may be taken less one of them. What all of them share changes neither Q nor
        # S2, but for the query's own length, and its rounding would drown what is left of them when the tokens collapse. The one must not
        # be long: the rounding of a long one, which a mask may hide, would drown the others. RoPE turns the keys by different angles,
        # so that they do not collapse with the tokens.
        tokens = subtract_short(V)
        if self.rope is not None:
            K, turned = kernel, kernel * lag_matrix(self.rope, V.shape[-1], V)
        else:
            K = turned = subtract_short(kernel) if self.qk_norm else tokens
        PV = average(tokens).mT  # P V, since V is symmetric
        U = average(PV)

        def find_parts(K: Matrix) -> tuple[Matrix, Matrix, Matrix]:
            """The three parts of Q, from the transpose of K."""
            PK = PV if K is tokens else average(K).mT
            return average(average(K * tokens).mT), average(PK * PV), U if PK is PV else average(PK)

        if self.rope is None:
            square, cross, outer = find_parts(K)
        else:
            square, cross, outer = sums = tuple(torch.zeros_like(V) for _ in range(3))
            for mode in self.modes(V):
                for total, part in zip(sums, find_parts(mode.mT * K), strict=True):
                    total.addcmul_(mode, part)
        squared = square - cross - cross.mT + outer * U
        PJ = PV if turned is tokens else average(turned).mT
        second = torch.add(turned.diagonal(dim1=-2, dim2=-1)[..., None, :], PJ, alpha=-2.0)
        own = kernel.diagonal(dim1=-2, dim2=-1)[..., :, None]
        return MeanChange(V, kernel, squared, softmax_derivative(P, second) * (0.5 * own))

    def move(self, point: Point, h: float, normals: Normals) -> Point:
        """A step of length h. The drift is cubic in V, so it is fast where V is large: such paths take the step in parts.

        With QK-norm it is linear, and `longest` bounds the step for every V.
        """
        if self.rate == 0.0:
            return point
        change = self.mean_change(point.V)
        moved = self.stride(point, h, change, normals)
        if self.qk_norm:
            return moved
        fast = change.fast(self.rate * h, self.noisiness)
        if len(fast):
            moved.V[fast] = self.move_in_parts(match_layout(point.V[fast], point.V), h, normals.fork())
        return moved

    @property
    def noisiness(self) -> float:
        """Four times variance over rate: at most this times the drift's first part is the variance of a token's relative change."""
        return 4.0 * self.variance / self.rate

    def move_in_parts(self, V: Float[Tensor, "batch m m"], h: float, normals: Normals) -> Float[Tensor, "batch m m"]:
        """A step of length h, with a number of parts for each path.

        A part changes no token's variance by more than the share STRIDE, on average, and with a variance of NOISE at most. While the
        variance grows by a share s, the drift grows by 2s. A stride, which takes the drift at its start, lags behind by about 1.4 s: 5/4 s
        where the drift's second part dominates, 3/2 s where the first does. So it is made longer than the part by that.

        The longer the tokens, the shorter the parts, so no number of parts can be too small for a path that comes back. A path ends
        earlier only above the ceiling, or where it does not come back (`find_lost`): then it is put above it.
        """
        left = V.new_full((len(V),), h)
        moving, ceiling = torch.arange(len(V), device=V.device), min(self.ceiling, largest_safe(V.dtype))
        for taken in itertools.count(1):
            here = Point(matrix=match_layout(V[moving], V))
            change = self.mean_change(here.V)
            speed, growth = change.speed_and_growth(self.noisiness)
            parts = (left[moving] * speed * (self.rate / STRIDE)).ceil_().clamp_(min=1.0)
            part = left[moving] / parts
            length = part * (1.0 + 1.4 * self.rate * part * growth)
            moved = self.stride(here, length[:, None, None], change, normals).V
            lost = (change.find_lost(parts, self.noisiness) | (taken == MOST_PARTS)) & (parts > 1.0)
            V[moving] = moved
            V[moving[lost]] = put_above(here.V[lost], ceiling)
            left[moving] -= part
            moving = moving[(parts > 1.0) & ~lost & ~exceeds(moved, ceiling)]
            if not len(moving):
                break
        return V

    def stride(self, point: Point, h: float | Float[Tensor, "batch 1 1"], change: MeanChange, normals: Normals) -> Point:
        r"""$V' = M V M^\top + h\,(\text{rate} - \text{variance})\,\mathbb{E}\,E V E^\top$, $M = I + \sqrt{h\,\text{variance}}\,E + h D$.

        $D = \tfrac12\,\text{rate}\cdot P \circ S_2$ brings in the drift's second part. The square of E, on average, and the last summand
        bring in its first part, $\text{rate}\cdot\mathbb{E}\,E V E^\top$. The rate is never below the variance (for a layer,
        variance/rate = gamma²/heads), so this is a sum of positive semi-definite matrices.
        """
        L = point.L
        E = self.first_order_change(point, normals)
        M = E.mul_((h * self.variance) ** 0.5).add_(change.second * (h * self.rate))
        moved = product_lower(M, L).add_(L)
        return Point(matrix=product(moved, moved.mT).addcmul_(change.kernel, change.squared * (h * (self.rate - self.variance))))

    def stopping_at(self, upper: float) -> LogitPerturbation:
        return replace(self, ceiling=upper)

    def longest(self, m: int) -> float:
        """Without QK-norm `move` chooses its parts by V. With it the drift is linear in V, and a step changes tokens of equal lengths by
        about STRIDE at most."""
        return STRIDE / (1.5 * self.rate) if self.qk_norm and self.rate else math.inf

    def plus(self, other: Term) -> Term | None:
        if not isinstance(other, LogitPerturbation) or not same_mask(self.mask, other.mask):
            return None
        if (self.qk_norm, self.rope) != (other.qk_norm, other.rope):
            return None
        return replace(self, rate=self.rate + other.rate, variance=self.variance + other.variance)


def softmax_derivative(P: Float[Tensor, "#rows m"], N: Float[Tensor, "*batch rows m"]) -> Float[Tensor, "*batch rows m"]:
    r"""$P \circ (N - (P \circ N) 11^\top)$: the derivative of a row-wise softmax with value P in the direction N."""
    return (N - weighted_mean(P, N)).mul_(P)


def centred_covariance(P: Float[Tensor, "m m"], K: Matrix, mode: Float[Tensor, "#m #m"]) -> Float[Tensor, "*batch m m m m"]:
    r"""$S_1$ of one mode: entry [a, k, c, j] is the covariance of the centred logits (a, k) and (c, j), without its factor $K_{ac}$."""
    W = (P * mode) @ K
    U = W @ (P * mode).mT
    right = mode.expand_as(P)
    left = right[:, :, None, None]
    straight = left * right * K[..., None, :, None, :]
    return straight - left * W.mT[..., None, :, :, None] - right * W[..., :, None, None, :] + U[..., :, None, :, None]


def put_above(V: Float[Tensor, "batch m m"], ceiling: float) -> Float[Tensor, "batch m m"]:
    """V, so much longer that its largest eigenvalue is a tenth above the ceiling, or, where that is the end of the safe part of the float
    range, that a token is."""
    is_bound = ceiling < largest_safe(V.dtype)
    largest = torch.linalg.eigvalsh(V)[:, -1] if is_bound else V.diagonal(dim1=-2, dim2=-1).amax(-1)
    return V * (1.1 * ceiling / largest)[:, None, None]


def subtract_short(K: Matrix) -> Matrix:
    """The Gram matrix of the tokens less one of them: the first, unless another is far shorter."""
    if K.is_cuda or K.ndim != 3:
        return subtract_shortest(K)
    first = K[..., :1, :]
    less = (K - first).sub_(first.mT).add_(first[..., :1])
    squares = K.diagonal(dim1=-2, dim2=-1)
    long = (squares[:, 0] > FAR * squares.amin(-1)).nonzero()[:, 0]  # few: to look for the shortest takes ten times as long
    if len(long):
        less[long] = subtract_shortest(K[long])
    return less


def subtract_shortest(K: Matrix) -> Matrix:
    """The Gram matrix of the tokens less the shortest of them."""
    place = K.diagonal(dim1=-2, dim2=-1).argmin(-1)[..., None, None]
    row = K.gather(-2, place.expand(*K.shape[:-2], 1, K.shape[-1]))
    return (K - row).sub_(row.mT).add_(row.gather(-1, place))


@dataclass(frozen=True, eq=False)
class MeanChange:
    r"""The mean effect of random logits on the tokens, at one covariance V.

    Attributes:
        kernel: K, what the logits see of the tokens.
        squared: Q with $\mathbb{E}\,E V E^\top = K \circ Q$.
        second: $\tfrac12 P \circ S_2$, the mean of the softmax's second order in the logits (Lemma mom-Softmax-taylor).
    """

    V: Matrix
    kernel: Matrix
    squared: Float[Tensor, "*batch rows rows"]
    second: Matrix

    def fast(self, time: float, noisiness: float) -> Int[Tensor, " fast"]:
        """The paths, by their numbers, on which in this time, for a rate of 1, a token's mean variance changes by more than STRIDE/8, or
        with a variance of more than NOISE."""
        size, noisiness = self.V.diagonal(dim1=-2, dim2=-1).amax(-1), noisiness / 8.0
        most = max(3.0, noisiness * STRIDE / NOISE)  # the speed is below this times the squared largest variance
        perhaps = (size.square_() > STRIDE / (8.0 * most * time)).nonzero()[:, 0]
        if not len(perhaps):
            return perhaps
        here = MeanChange(self.V[perhaps], self.kernel[perhaps], self.squared[perhaps], self.second[perhaps])
        speed, _ = here.speed_and_growth(noisiness)
        return perhaps[speed > STRIDE / (8.0 * time)]

    def split_growth(self) -> tuple[Float[Tensor, "batch rows"], Float[Tensor, "batch m"]]:
        """The relative change of each token's mean variance in a unit of time, for a rate of 1: by the drift's first part and second."""
        second = (self.second * self.V).sum(-1).mul_(2.0) / self.V.diagonal(dim1=-2, dim2=-1)
        return self.squared.diagonal(dim1=-2, dim2=-1), second.nan_to_num_(0.0)  # a token of length zero

    def speed_and_growth(self, noisiness: float) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """The largest relative change of a token's mean variance in a unit of time, up or down, and the largest up; for a rate of 1.

        Where the noise is what limits a part, the speed is what the noise allows.
        """
        own, second = self.split_growth()
        speed = torch.maximum(own + second.abs(), own * (noisiness * STRIDE / NOISE)).amax(-1)
        return speed, (own + second).amax(-1).clamp_(min=0.0)

    def find_lost(self, parts: Float[Tensor, " batch"], noisiness: float) -> Bool[Tensor, " batch"]:
        r"""The paths that explode: they do not come back to where the rest of a step, now of so many parts, has one.

        The logarithm of the longest token's variance has a drift $g - n/2$ and a noise of variance n, both times the squared length: g
        from the drift, n = noisiness times its first part. While the tokens keep their directions, it falls by $\log R$ with the
        probability $R^{-(2g/n - 1)}$ at most, and parts are as $R^2$. Without noise a path explodes within 2.5 parts of time.
        """
        own, second = self.split_growth()
        longest = self.V.diagonal(dim1=-2, dim2=-1).argmax(-1, keepdim=True)
        own, growth = (rate.gather(-1, longest)[:, 0] for rate in (own.expand_as(second), own + second))
        steepness = 2.0 * growth / (noisiness * own) - 1.0
        return (parts > SURE) & (0.5 * steepness * parts.log() > -math.log(NO_RETURN))
