"""Softmax attention of Transformers in use: grouped heads, rotary positions, QK-norm, soft caps, sliding windows, biases."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shaped.checks import finite, in_range, keep, positive, whole_number
from shaped.covariance import Point
from shaped.layers.base import count_at_once
from shaped.layers.branches import Branch, Covariance, Entropy, Rows, Weights, check_weights
from shaped.layers.masks import Mask, check_mask, describe_mask
from shaped.layers.normalisation import Norm, check_norm
from shaped.layers.rope import Rope, check_rope, check_rope_width, describe_rope, find_frequencies
from shaped.nn.functional import attention_matrix, logit_bias, rotation_of_places
from shaped.nn.random_blocks import RandomSelfAttention
from shaped.randomness import Stream

Queries = Float[Tensor, "batch groups m share width"]
Matrices = Float[Tensor, "batch groups m share m"]
Keys = Float[Tensor, "batch groups m width"]


@dataclass(frozen=True, eq=False)
class AttentionBranch(Branch):
    r"""$f(Y) = \gamma\,[A_h (Y W^V_{g(h)} + b^V)]_h W^O + b^O$.

    Head h has the keys and values of its group g(h) = h // (heads/key_heads).

    $A = \text{softmax}(\text{scale}\cdot q k^\top + B)$, plus $\gamma_1 I - \gamma_2\,\text{softmax}(B)$ if shaped.

    Args:
        heads, head_width: their product need not be the width of the stream.
        query, key, value, output: the weights.
        key_heads: number of heads of the keys and values; by default `heads`. 1 is multi-query attention.
        scale: factor of the logits; by default $1/\sqrt{\text{head_width}}$.
        mask: None, "causal", or a bias on the logits, [m, m] or [heads, m, m], as in `ShapedAttention`.
        window: with the causal mask, a token sees only the last `window` tokens, itself among them.
        softcap: c of $c\tanh(\text{logits}/c)$, before the bias is added (Gemma 2).
        qk_norm: norm of queries and keys, before the rotation.
        qk_norm_over: "head" (the features of one head: Qwen3) or "all" (of all heads at once: OLMo 2).
        rope: a base, or the frequencies, one for each pair of features. Fewer than head_width/2 frequencies leave the other
            features as they are, as GPT-NeoX does: `rope=rope_frequencies(head_width // 4)`.
        gamma1, gamma2: the shaping; 0 is plain attention.
        gamma: factor of what the heads return, before the output weights (Eq. shaped_transformer).
    """

    heads: int
    head_width: int
    query: Weights
    key: Weights
    value: Weights
    output: Weights
    key_heads: int | None = None
    scale: float | None = None
    mask: Mask = None
    window: int | None = None
    softcap: float | None = None
    qk_norm: Norm | None = None
    qk_norm_over: str = "head"
    rope: Rope = None
    gamma1: float = 0.0
    gamma2: float = 0.0
    gamma: float = 1.0

    def __post_init__(self) -> None:
        keep(self, whole_number, "heads", "head_width", "key_heads", "window")
        for name in ("query", "key", "value", "output"):
            check_weights(name, getattr(self, name))
        if self.key_heads is not None and self.heads % self.key_heads:
            raise ValueError(f"key_heads must divide the number of heads, {self.heads}, got {self.key_heads}")
        keep(self, finite, "scale")
        keep(self, positive, "softcap")
        keep(self, in_range, "gamma1", "gamma2", "gamma", low=-1e18, high=1e18)
        object.__setattr__(self, "mask", check_mask(self.mask, self.heads))
        if self.window is not None and not isinstance(self.mask, str):
            raise ValueError(f"window must be None unless mask is 'causal', got {self.window} (write it into the mask, [m, m])")
        check_norm("qk_norm", self.qk_norm)
        if self.qk_norm_over not in ("head", "all"):
            raise ValueError(f"qk_norm_over must be 'head' or 'all', got {self.qk_norm_over!r}")
        if self.qk_norm is None and self.qk_norm_over != "head":
            raise ValueError(f"qk_norm_over must be left out without qk_norm, got {self.qk_norm_over!r}")
        object.__setattr__(self, "rope", check_rope(self.rope))
        check_rope_width(self.rope, self.head_width, name="head_width", partly=True)

    def __repr__(self) -> str:
        """The arguments that are not the defaults, on one line."""
        given = {entry.name: getattr(self, entry.name) for entry in fields(self) if getattr(self, entry.name) is not entry.default}
        describe = {"mask": describe_mask, "rope": describe_rope}
        texts = (f"{name}={describe.get(name, repr)(value)}" for name, value in given.items())
        return f"AttentionBranch({', '.join(texts)})"

    def bias(self, m: int, like: Tensor) -> Float[Tensor, "*heads m m"]:
        """B with the sliding window: -inf for keys that are `window` or more tokens back."""
        B = logit_bias(self.mask, m, like)
        if self.window is None:
            return B
        place = torch.arange(m, device=like.device)
        return B.masked_fill(place[:, None] - place >= self.window, -torch.inf)

    def check_keys(self, n_k: int) -> None:
        if n_k != self.head_width:
            raise ValueError(f"n_k must be left out or be head_width = {self.head_width} for an AttentionBranch, got {n_k}")

    def covariance(self, entering: Point, n: int, stream: Stream) -> tuple[Covariance, Entropy]:
        r"""The covariance is $\sigma_O^2\gamma^2 \sum_h A_h v_g v_g^\top A_h^\top + \sigma_b^2 11^\top$, where $v_g$ are a group's values.

        A few samples and groups of heads are drawn at a time, so that they stay in the cache.
        """
        L = entering.L.contiguous()
        m = L.shape[-1]
        rows = tuple(weights.rows(L, n) for weights in (self.query, self.key, self.value))
        bias = self.bias(m, L).expand(self.heads, m, m).unflatten(0, (self.groups, self.share)).transpose(1, 2)
        total, entropy = L.new_zeros(L.shape), L.new_zeros(len(L))
        few, groups, share = self.split(m, L.device)
        for first in range(0, len(L), few):
            part = slice(first, first + few)
            F_q, F_k, F_v = (F[part] for F in rows)
            keys, values = self.keys(F_k, self.groups, stream), draw_root(F_v, self.groups, self.head_width, stream)
            for start in range(0, self.groups, groups):
                B, k, v = bias[start : start + groups], keys[:, start : start + groups], values[:, start : start + groups]
                for head in range(0, self.share, share):
                    near = B[:, :, head : head + share]
                    A, spread = self.attention(self.queries(F_q, len(B), near.shape[2], k.shape[-1], stream), k, near)
                    mixed = (A.flatten(2, 3) @ v).unflatten(2, (m, -1)).flatten(3)
                    total[part] += (mixed @ mixed.mT).sum(1)
                    entropy[part] += spread
        return self.output.covariance(total.mul_(self.gamma**2)), entropy / (self.heads * m)

    def split(self, m: int, device: torch.device) -> tuple[int, int, int]:
        """How many samples, groups of heads, and heads of a group are drawn at once, so that their queries and logits stay in the cache."""
        heads = max(1, count_at_once(device) // (m * max(m, self.head_width)))
        if self.qk_norm_over == "all":
            return max(1, heads // self.heads), self.groups, self.share
        return max(1, heads // self.heads), min(self.groups, max(1, heads // self.share)), min(self.share, heads)

    def keys(self, F: Rows, groups: int, stream: Stream) -> Keys:
        r"""Keys of some groups of heads, after the norm and the rotation.

        With neither, only the products $q k^\top$ count. The keys are $F T O$ with T of Bartlett and orthonormal rows of O, and queries
        $F_q Z$ meet them only through $Z O^\top$, which is normal. Then F T stands for the keys, and queries of as few features are enough.
        """
        if self.qk_norm is None and self.rope is None:
            return draw_root(F, groups, self.head_width, stream)
        return self.queries(F, groups, 1, self.head_width, stream)[:, :, :, 0]

    def queries(self, F: Rows, groups: int, share: int, width: int, stream: Stream) -> Queries:
        """Queries of some heads, after the norm and the rotation."""
        q = (F[:, None] @ stream.normal(len(F), groups, F.shape[-1], share * width)).unflatten(-1, (share, width))
        if self.qk_norm is not None:
            q = normalise_heads(q, self.qk_norm, self.qk_norm_over)
        if self.rope is None:
            return q
        cos, sin = (part[:, None].to(q) for part in rotation_of_places(q.shape[2], self.frequencies))
        return rotate_in_place(q, cos, sin)

    def attention(self, q: Queries, k: Keys, bias: Float[Tensor, "groups m share m"]) -> tuple[Matrices, Entropy]:
        """A of each head, and the sum of the entropies of all rows of the softmax."""
        logits = (q.flatten(2, 3) @ k.mT).mul_(self.factor)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        logits = logits.unflatten(2, q.shape[2:4])
        logarithm = torch.log_softmax(logits + bias, -1)
        P = logarithm.softmax(-1)  # exp is slow for -inf and for results that underflow
        logarithm.clamp_(min=-1e4)  # not -inf, which times 0 would be nan
        entropy = -torch.linalg.vecdot(P.flatten(1), logarithm.flatten(1))
        if self.gamma1 == self.gamma2 == 0.0:
            return P, entropy
        heads_first = (logits.transpose(2, 3), bias.transpose(-3, -2))
        return attention_matrix(*heads_first, self.gamma1, self.gamma2).transpose(2, 3), entropy

    @property
    def features(self) -> int:
        return self.heads * self.head_width

    @property
    def groups(self) -> int:
        """Heads of the keys and values."""
        return self.heads if self.key_heads is None else self.key_heads

    @property
    def share(self) -> int:
        """Heads that share their keys and values."""
        return self.heads // self.groups

    @property
    def factor(self) -> float:
        """Of the logits."""
        return self.head_width**-0.5 if self.scale is None else self.scale

    @property
    def frequencies(self) -> tuple[float, ...]:
        """By which pairs of features are rotated."""
        assert self.rope is not None
        return find_frequencies(self.rope, self.head_width)

    def module(self, n: int, **draw: Any) -> nn.Module:
        pairs = ((weights.std, weights.bias) for weights in (self.query, self.key, self.value, self.output))
        return RandomSelfAttention(
            n,
            self.heads,
            self.groups,
            self.head_width,
            *pairs,
            scale=self.factor,
            mask=self.mask,
            window=self.window,
            softcap=self.softcap,
            qk_norm=None if self.qk_norm is None else self.qk_norm.module,
            qk_norm_over=self.qk_norm_over,
            rope=None if self.rope is None else self.frequencies,
            gammas=(self.gamma1, self.gamma2),
            gamma=self.gamma,
            **draw,
        )


def draw_root(F: Rows, groups: int, width: int, stream: Stream) -> Keys:
    """A root of the Gram matrix of `width` features F Z, for each group: F T, T of Bartlett, with no more features than F has columns."""
    T = stream.bartlett(F.new_empty(groups * len(F), 1, 1), F.shape[-1], width)
    return F[:, None] @ T.reshape(groups, len(F), *T.shape[1:]).transpose(0, 1)


def normalise_heads(x: Queries, norm: Norm, over: str) -> Queries:
    """The norm of each head's features, or of those of all heads at once."""
    if over == "head":
        return norm.apply(x)
    whole = x.transpose(1, 2)
    return norm.apply(whole.flatten(2)).view(whole.shape).transpose(1, 2)


def rotate_in_place(x: Queries, cos: Float[Tensor, "m 1 pairs"], sin: Float[Tensor, "m 1 pairs"]) -> Queries:
    """`functional.rotate` without copies of x: a layer of Llama 405B's attention takes 13 % less time."""
    pairs = cos.shape[-1]
    one, other = x[..., :pairs], x[..., pairs : 2 * pairs]
    across = one * sin
    one.mul_(cos).addcmul_(other, sin, value=-1.0)
    other.mul_(cos).add_(across)
    return x
