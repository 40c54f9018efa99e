"""Shaped attention (Eq. shaped-attention) for any mask or bias on the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import add

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shaped.checks import as_tensor, positive, whole_number
from shaped.covariance import Matrix, Point, factor, laid_out_like, product, weighted_mean
from shaped.layers.base import Factor, NoLimit, ResidualLayer, Sizes, check_residual
from shaped.layers.terms import Term, WeightNoise
from shaped.nn.functional import attention_matrix, logit_bias
from shaped.nn.networks import RandomAttention, Residual
from shaped.randomness import Normals, Stream

Rows = Float[Tensor, "rows m"]  # the rows of an m x m matrix, or one row that stands for all of them
Mask = str | Tensor | None


def resting_attention(mask: Mask, m: int, like: Tensor) -> Rows:
    r"""$P = \text{softmax}(B)$ row by row: the attention at zero logits, by which shaped attention is centred.

    Without a mask it is $11^\top/m$ (Eq. shaped-attention): one row stands for all, and sums over it cost O(m²). For the causal mask
    it has 1/i in the first i entries of row i (below that equation).
    """
    if mask is None:
        return like.new_full((1, m), 1.0 / m)
    return torch.softmax(logit_bias(mask, m, like), -1)


@dataclass(frozen=True, eq=False)
class LogitPerturbation(Term):
    r"""What random logits of size $O(n^{-1/2})$ do to the covariance, for attention centred at its resting state P.

    Let $N$ be the logits' limit, $\mathbb{E} N^{\alpha\delta} N^{\beta\omega} = V^{\alpha\beta} V^{\delta\omega}$ (Lemma mom-y), and
    $E = P \circ (N - (P \circ N) 11^\top)$ the first-order change of the softmax. Then, for Thm. sde-attention in its general form,
    $b = \text{rate}\,[\mathbb{E}\,E V E^\top + \tfrac12 (P \circ S_2) V + \tfrac12 V (P \circ S_2)^\top]$, and the noise is
    $\sqrt{\text{variance}}\,(E V + V E^\top)$.
    """

    mask: Mask = field(repr=False)
    rate: float
    variance: float

    def drift(self, V: Matrix) -> Matrix:
        P = resting_attention(self.mask, V.shape[-1], V)
        second = product(second_order_change(P, V), V)
        return self.rate * (squared_change(P, V) * V + second + second.mT)

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
        r"""$V' = M V M^\top + h\,(\text{rate} - \text{variance})\,E V E^\top$ with $M = I + \sqrt{h\,\text{variance}}\,E + h\,D$.

        $D = \tfrac12\,\text{rate}\cdot P \circ S_2$ brings in the drift's second part, and the two squares in E its first part:
        on average they add up to $\text{rate}\cdot h\,\mathbb{E}\,E V E^\top$. The rate is never below the variance (for a layer,
        variance/rate = gamma²/heads), so this is a sum of positive semi-definite matrices.
        """
        L, V = point.L, point.V
        P = resting_attention(self.mask, V.shape[-1], V)
        E = first_order_change(P, L, normals)
        M = torch.add(math.sqrt(h * self.variance) * E, second_order_change(P, V), alpha=h * self.rate)
        moved = L + product(M, L)
        spread = product(E, L)
        return Point(matrix=product(moved, moved.mT).add_(product(spread, spread.mT), alpha=h * (self.rate - self.variance)))

    def plus(self, other: Term) -> Term | None:
        if not isinstance(other, LogitPerturbation) or not same_mask(self.mask, other.mask):
            return None
        return LogitPerturbation(self.mask, self.rate + other.rate, self.variance + other.variance)


def same_mask(one: Mask, other: Mask) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or (isinstance(one, str) and one == other)


def softmax_derivative(P: Float[Tensor, "#rows m"], N: Float[Tensor, "*batch rows m"]) -> Float[Tensor, "*batch rows m"]:
    r"""$P \circ (N - (P \circ N) 11^\top)$: the derivative of a row-wise softmax with value P in the direction N."""
    return (N - weighted_mean(P, N)).mul_(P)


def first_order_change(P: Rows, L: Float[Tensor, "*batch m k"], normals: Normals) -> Matrix:
    r"""A draw of $E = P \circ (N - (P \circ N) 11^\top)$ with $N = L G L^\top$: the softmax's first order in the logits."""
    N = product(product(L, normals.square(L)), L.mT)
    return softmax_derivative(P, N)


def second_order_change(P: Rows, V: Matrix) -> Matrix:
    r"""$\tfrac12 P \circ S_2$, the mean of the softmax's second order in the logits (Lemma mom-Softmax-taylor).

    $S_2^{\alpha\delta} = V^{\alpha\alpha}(C^{\alpha\delta} - \sum_\kappa P^{\alpha\kappa} C^{\alpha\kappa})$ with
    $C^{\alpha\delta} = V^{\delta\delta} - 2 (PV)^{\alpha\delta}$, up to what does not depend on $\delta$ and so drops out.
    """
    v = V.diagonal(dim1=-2, dim2=-1)
    W = product(V, P.mT).mT  # P V, since V is symmetric; for the one row of an unmasked P this order is several times faster
    C = torch.add(v[..., None, :], W, alpha=-2.0)
    return softmax_derivative(P, C) * (0.5 * v[..., :, None])


def squared_change(P: Rows, V: Matrix) -> Float[Tensor, "*batch rows rows"]:
    r"""Q with $\mathbb{E}\,E V E^\top = V \circ Q$: $Q = P(V{\circ}V)P^\top - (W{\circ}W)P^\top - P(W{\circ}W)^\top + U{\circ}U$,
    where W = PV and U = PVPᵀ."""
    W = product(P, V)
    U = product(W, P.mT)
    cross = product(W * W, P.mT)
    return product(product(P, V * V), P.mT) - cross - cross.mT + U * U


@dataclass(frozen=True, eq=False)
class ShapedAttention(ResidualLayer):
    r"""$X' = \lambda X + \gamma A X W^V/\sqrt{n}$ (Eq. model), $A = I + \text{softmax}(Y/\tau + B) - \text{softmax}(B)$,
    $\tau = \tau_0\sqrt{n n_k}$ (Eq. shaped-attention).

    Args:
        gamma: weight of the residual branch.
        tau0: temperature.
        heads: number of heads; each has its own logits and n/heads of the values.
        project: multiply the heads' values by an output matrix W^O, as every Transformer in use does.
        mask: None (every token sees every token), "causal", or an [m, m] bias B on the logits: numbers, with -inf where a token
            is not to be attended to, or booleans, with True where it is.
        lam: weight of the shortcut; by default sqrt(1 - gamma²).
        identity, centre, temperature: the three modifications that shape attention. Without the identity or the centring that term
            is missing from A; without the temperature $\tau = \tau_0\sqrt{n_k}$. With all three off this is softmax attention
            (Eq. Softmax-att). A layer that lacks one of them has a law and a module, but no limit.
    """

    gamma: float
    tau0: float = 1.0
    heads: int = 1
    project: bool = False
    mask: Mask = None
    lam: float | None = None
    identity: bool = True
    centre: bool = True
    temperature: bool = True

    def __post_init__(self) -> None:
        check_residual(self.gamma, self.lam)
        positive("tau0", self.tau0)
        whole_number("heads", self.heads)
        object.__setattr__(self, "mask", _as_bias(self.mask))

    def __repr__(self) -> str:
        """The arguments that are not the defaults, on one line."""
        mask = f"<{self.mask.shape[0]} x {self.mask.shape[0]} bias>" if isinstance(self.mask, Tensor) else repr(self.mask)
        shown = {entry.name: mask if entry.name == "mask" else repr(getattr(self, entry.name)) for entry in fields(self)}
        usual = {entry.name: repr(entry.default) for entry in fields(self)}
        return f"ShapedAttention({', '.join(f'{name}={text}' for name, text in shown.items() if text != usual[name])})"

    def limit(self) -> tuple[Term, ...]:
        r"""Thm. sde-attention: $\Sigma = \gamma^2(2-\gamma^2)\Sigma_{\text{lin}} + \gamma^4\tau_0^{-2}\mathcal{A}$.

        Beyond the paper: heads with logits of their own average out, $\mathcal{A}/H$; an output projection is a second weight
        matrix, $2\gamma^2\Sigma_{\text{lin}}$.
        """
        missing = [
            reason
            for present, reason in (
                (self.identity, "identity=False leaves A = softmax - softmax(B), which is not near I: A V Aᵀ - V is O(1)"),
                (self.centre, "centre=False leaves softmax(B), the attention at zero logits, in A: A V Aᵀ - V is O(1)"),
                (self.temperature, "temperature=False leaves logits Y/sqrt(n_k) that do not shrink with n: A - I is O(1)"),
            )
            if not present
        ]
        if missing:
            raise NoLimit(f"{self!r} has no limit: {'; '.join(missing)}")
        self.check_shortcut()
        share = self.gamma**2
        weights = 2.0 * share if self.project else share * (2.0 - share)
        rate = share / self.tau0**2
        return WeightNoise(weights), LogitPerturbation(self.mask, rate, rate * share / self.heads)

    @property
    def needs_tokens(self) -> bool:
        return self.heads > 1 and not self.project

    def check_sizes(self, sizes: Sizes) -> None:
        if sizes.n % self.heads:
            raise ValueError(f"heads must divide the width n = {sizes.n}, got {self.heads}")

    def tau(self, n: int, n_k: int) -> float:
        return self.tau0 * math.sqrt(n * n_k if self.temperature else n_k)

    def branch(self, L: Factor, sizes: Sizes, stream: Stream) -> tuple[Factor, ...]:
        r"""$A_h L$ for each head h. With a projection, a factor of $\sum_h (A_h L T_h)(A_h L T_h)^\top/n$, the Gram matrix of the heads'
        values, T of Bartlett for n/heads degrees."""
        heads = [product(self.attention(L, sizes, stream), L) for _ in range(self.heads)]
        if not self.project:
            return tuple(heads)
        m = L.shape[-1]
        roots = [product(F, stream.bartlett(L, m, sizes.n // self.heads)) for F in heads]
        return (factor(reduce(add, (product(root, root.mT) for root in roots)) / sizes.n),)

    def attention(self, L: Factor, sizes: Sizes, stream: Stream) -> Matrix:
        r"""A draw of A. The logits $X W^Q W^{K\top} X^\top/n$ have the law of $L T G L^\top$, T of Bartlett for n_k degrees."""
        n_k, m = sizes.keys(self.heads), L.shape[-1]
        T = stream.bartlett(L, m, n_k)
        G = stream.matrices(L, T.shape[-1], m).mul_(1.0 / self.tau(sizes.n, n_k))
        logits = product(product(L, product(T, G)), L.mT)
        return laid_out_like(attention_matrix(logits, logit_bias(self.mask, m, L), float(self.identity), float(self.centre)), L)

    def module(
        self, n: int, n_k: int | None = None, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None
    ) -> nn.Module:
        sizes = Sizes(n, n_k)
        self.check_sizes(sizes)
        keys = sizes.keys(self.heads)
        branch = RandomAttention(
            n,
            keys,
            self.heads,
            self.project,
            self.tau(n, keys),
            float(self.identity),
            float(self.centre),
            self.mask,  # "causal" or a bias
            generator=generator,
            dtype=dtype,
        )
        return Residual(branch, self.shortcut, self.gamma)


def _as_bias(mask: object) -> Mask:
    if mask is None or (isinstance(mask, str) and mask == "causal"):
        return mask
    if isinstance(mask, str):
        raise ValueError(f"mask must be None, 'causal' or an [m, m] bias on the logits, got {mask!r}")
    bias = as_tensor("mask", mask).detach().clone()
    if bias.ndim != 2 or bias.shape[0] != bias.shape[1] or not len(bias):
        raise ValueError(f"mask must be square, [m, m], got shape {tuple(bias.shape)}")
    if bias.dtype == torch.bool:
        bias = torch.where(bias, 0.0, -torch.inf)
    if not bias.dtype.is_floating_point:
        raise ValueError(f"mask must hold booleans or floating point numbers, got {bias.dtype}")
    bias = bias.to(torch.float64)
    if (bias.isnan() | (bias == torch.inf)).any():
        raise ValueError("mask must hold numbers or -inf, got nan or +inf")
    empty = (bias == -torch.inf).all(-1).nonzero().flatten()
    if len(empty):
        raise ValueError(f"mask must leave every token something to attend to, got row {empty[0].item()} with nothing")
    return bias
