"""Shaped attention (Eq. shaped-attention) for any mask or bias on the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import add

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shaped.checks import as_tensor, check_bool, keep, positive, whole_number
from shaped.covariance import Matrix, check_covariance, factor, inverse_length, match_layout, product
from shaped.layers.base import Factor, NoLimit, ResidualLayer, Sizes, count_at_once, keep_weights
from shaped.layers.logits import LogitPerturbation
from shaped.layers.masks import Mask, check_mask, describe_mask, head_masks
from shaped.layers.rope import Rope, check_rope, check_rope_width, describe_rope, find_frequencies
from shaped.layers.terms import Term, WeightNoise
from shaped.nn.diagnostics import softmax_entropy
from shaped.nn.functional import attention_matrix, logit_bias, rotate, rotation_of_places
from shaped.nn.networks import RandomAttention, Residual
from shaped.randomness import Stream


@dataclass(frozen=True, eq=False)
class ShapedAttention(ResidualLayer):
    r"""$X' = \lambda X + \gamma A X W^V/\sqrt{n}$ (Eq. model), $A = I + \text{softmax}(Y/\tau + B) - \text{softmax}(B)$,
    $\tau = \tau_0\sqrt{n n_k}$ (Eq. shaped-attention).

    Args:
        gamma: weight of the residual branch.
        tau0: temperature.
        heads: number of heads; each has its own logits and n/heads of the values.
        project: multiply the heads' values by an output matrix W^O, as every Transformer in use does.
        mask: None (every token sees every token), "causal", or a bias B on the logits, [m, m] for all heads or [heads, m, m] with one for
            each (such as `shaped.alibi(m, heads)`): numbers, with -inf where a token is not to be attended to, or booleans, with True
            where it is.
        lam: weight of the shortcut; by default sqrt(1 - gamma²).
        identity, centre, temperature: the three modifications that shape attention. Without the identity or the centring that term
            is missing from A; without the temperature $\tau = \tau_0\sqrt{n_k}$. With all three off this is softmax attention
            (`unshaped`). A layer that lacks one of them has a law and a module, but no limit.
        qk_norm: divide every query and every key by its root mean square over the n_k features (QK-norm). A token of length zero has
            logits 0. The limit takes wide keys; at a fixed n_k logits differ from it by up to 1/n_k.
        rope: rotate queries and keys by their positions (RoPE): a base, such as 10000.0, or n_k/2 frequencies in radians a token. In the
            limit a base has a continuum of frequencies.
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
    qk_norm: bool = False
    rope: Rope = None

    def __post_init__(self) -> None:
        keep_weights(self)
        keep(self, positive, "tau0")
        keep(self, whole_number, "heads")
        object.__setattr__(self, "mask", check_mask(self.mask, self.heads))
        object.__setattr__(self, "rope", check_rope(self.rope))
        keep(self, check_bool, "project", "identity", "centre", "temperature", "qk_norm")

    def __repr__(self) -> str:
        """The arguments that are not the defaults, on one line."""
        shown = {entry.name: repr(getattr(self, entry.name)) for entry in fields(self)}
        shown |= {"mask": describe_mask(self.mask), "rope": describe_rope(self.rope)}
        usual = {entry.name: repr(entry.default) for entry in fields(self)}
        return f"ShapedAttention({', '.join(f'{name}={text}' for name, text in shown.items() if text != usual[name])})"

    @property
    def unshaped(self) -> ShapedAttention:
        r"""The same layer with softmax attention, $A = \text{softmax}(Y/(\tau_0\sqrt{n_k}) + B)$ (Eq. Softmax-att): all three are off."""
        return replace(self, identity=False, centre=False, temperature=False)

    def limit(self) -> tuple[Term, ...]:
        r"""Thm. sde-attention: $\Sigma = \gamma^2(2-\gamma^2)\Sigma_{\text{lin}} + \gamma^4\tau_0^{-2}\mathcal{A}$.

        Beyond the paper: heads with logits of their own average out, $\mathcal{A}/H$; an output projection is a second weight
        matrix, $2\gamma^2\Sigma_{\text{lin}}$. Heads with biases of their own are centred at their own resting attention, and each adds
        its share of drift, 1/H, and of noise, $1/H^2$. QK-norm and RoPE change the covariance of the logits (`LogitPerturbation`).
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
        logits = (
            LogitPerturbation(mask, rate / self.heads, rate * share / self.heads**2, self.qk_norm, self.rope)
            for mask in head_masks(self.mask, self.heads)
        )
        return WeightNoise(weights), *logits

    @property
    def needs_tokens(self) -> bool:
        return self.heads > 1 and not self.project

    def check_sizes(self, sizes: Sizes) -> None:
        if sizes.n % self.heads:
            raise ValueError(f"heads must divide the width n = {sizes.n}, got {self.heads}")
        check_rope_width(self.rope, sizes.keys(self.heads))

    def tau(self, n: int, n_k: int) -> float:
        """The temperature at these widths."""
        return self.tau0 * math.sqrt(n * n_k if self.temperature else n_k)

    def branch(self, L: Factor, sizes: Sizes, stream: Stream) -> tuple[Factor, ...]:
        r"""$A_h L$ for each head h. With a projection, a factor of $\sum_h (A_h L T_h)(A_h L T_h)^\top/n$, the Gram matrix of the heads'
        values, T of Bartlett for n/heads degrees."""
        heads = [self.attention(mask, L, sizes, stream) for mask in head_masks(self.mask, self.heads)]
        if not self.project:
            return tuple(product(A, L) for A in heads)
        values = (stream.bartlett(L, L.shape[-1], sizes.n // self.heads) for _ in heads)
        roots = [multiply_three(A, L, T) for A, T in zip(heads, values, strict=True)]
        return (factor(reduce(add, (product(root, root.mT) for root in roots)) / sizes.n),)

    def attention(self, mask: Mask, L: Factor, sizes: Sizes, stream: Stream) -> Matrix:
        """A draw of one head's A."""
        logits, bias = self.logits(L, sizes, stream), logit_bias(mask, L.shape[-1], L)
        return match_layout(attention_matrix(logits, bias, float(self.identity), float(self.centre)), L)

    def logits(self, L: Factor, sizes: Sizes, stream: Stream) -> Matrix:
        r"""A draw of one head's $Y/\tau$."""
        n_k = sizes.keys(self.heads)
        draw = self.rotated_logits if self.rope is not None else self.normalised_logits if self.qk_norm else self.plain_logits
        return draw(L, n_k, 1.0 / self.tau(sizes.n, n_k), stream)

    def entropy(self, V: Float[Tensor, "batch m m"], *, n: int, n_k: int | None = None, seed: int) -> Float[Tensor, " batch"]:
        r"""A draw of the entropy of the softmax in nats, its mean over heads and queries, for tokens of width n with covariance V.

        The softmax is that of $Y/\tau + B$, before the identity is added and softmax(B) subtracted. Its weights are drawn for this call.
        """
        V, sizes = as_tensor("V", V), Sizes(n, n_k)
        check_covariance(V, "V")
        if V.ndim != 3:
            raise ValueError(f"V must be [batch, m, m], got shape {tuple(V.shape)}")
        self.check_sizes(sizes)
        L = factor(V).contiguous()
        stream = Stream(whole_number("seed", seed, least=0, most=math.inf), 0, kind="entropy", dtype=V.dtype, device=V.device)
        total = V.new_zeros(len(V))
        for mask in head_masks(self.mask, self.heads):
            bias = logit_bias(mask, V.shape[-1], V)
            total += softmax_entropy(self.logits(L, sizes, stream) + bias).mean(-1)
        return total / self.heads

    def plain_logits(self, L: Factor, n_k: int, scale: float, stream: Stream) -> Matrix:
        r"""The logits $X W^Q W^{K\top} X^\top/n$ have the law of $L T G L^\top$, T of Bartlett for n_k degrees."""
        m = L.shape[-1]
        T = stream.bartlett(L, m, n_k)
        G = stream.matrices(L, T.shape[-1], m).mul_(scale)
        if T.shape[-1] < m:
            return product(product(L, T), product(G, L.mT))
        return product(product(L, product(T, G)), L.mT)

    def normalised_logits(self, L: Factor, n_k: int, scale: float, stream: Stream) -> Matrix:
        r"""The same with queries and keys of length $\sqrt{n_k}$.

        In a basis of the queries' span the queries are $L T$ and the keys $L G$. The rest of the keys is orthogonal to all queries: it
        enters the keys' lengths alone, by its Gram matrix $L S S^\top L^\top$, S of Bartlett for the other n_k - m degrees.
        """
        m = L.shape[-1]
        T = stream.bartlett(L, m, n_k)
        queries, keys = product(L, T), product(L, stream.matrices(L, m, T.shape[-1]))
        query_length, key_length = queries.square().sum(-1), keys.square().sum(-1)
        if n_k > m:
            key_length = key_length + product(L, stream.bartlett(L, m, n_k - m)).square().sum(-1)
        queries = queries * inverse_length(query_length)[..., None]
        keys = keys * (inverse_length(key_length) * (scale * n_k))[..., None]
        return product(queries, keys.mT)

    def rotated_logits(self, L: Factor, n_k: int, scale: float, stream: Stream) -> Matrix:
        """The same with RoPE. It tells features apart, so queries and keys are drawn: 2·m·n_k normals."""
        assert self.rope is not None
        batch, m = len(L), L.shape[-1]
        cos, sin = (part.to(L) for part in rotation_of_places(m, find_frequencies(self.rope, n_k)))
        logits = L.new_empty(batch, m, m)
        few = max(1, count_at_once(L.device) // (m * n_k))
        for first in range(0, batch, few):
            part = L[first : first + few].contiguous()
            queries, keys = part @ stream.rows(part, m, n_k), part @ stream.matrices(part, m, n_k)
            logits[first : first + few] = rotate(queries, cos, sin) @ rotate(keys, cos, sin).mT
            if self.qk_norm:
                query_length, key_length = (inverse_length(x.square().sum(-1)) for x in (queries, keys))
                logits[first : first + few].mul_(query_length[..., None]).mul_(key_length[..., None, :]).mul_(n_k)
        return match_layout(logits.mul_(scale), L)

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
            self.mask,
            self.qk_norm,
            None if self.rope is None else find_frequencies(self.rope, keys),
            generator=generator,
            dtype=dtype,
        )
        return Residual(branch, self.shortcut, self.gamma)


def multiply_three(A: Matrix, L: Matrix, T: Float[Tensor, "*batch m few"]) -> Float[Tensor, "*batch m few"]:
    """A L T. With fewer columns in T than in L, it costs less from the right."""
    return product(A, product(L, T)) if T.shape[-1] < L.shape[-1] else product(product(A, L), T)
