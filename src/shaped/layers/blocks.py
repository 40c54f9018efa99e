"""ResidualBlock: any residual block of a Transformer in use, with its norms in any place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor, nn

from shaped.checks import finite, keep, quote
from shaped.covariance import Point, factor, gram, match_layout
from shaped.layers.base import Layer, NoLimit, Sizes, Tokens, split_update
from shaped.layers.branches import Branch, Covariance
from shaped.layers.normalisation import Norm, check_norm, refuse_gram
from shaped.layers.terms import Term
from shaped.nn.random_blocks import RandomBlock
from shaped.randomness import Stream

Norms = Norm | tuple[Norm | None, ...] | None
Seen = dict[str, Tensor]


@dataclass(frozen=True)
class ResidualBlock(Layer):
    r"""$X' = \text{after}(\lambda X + \gamma\,\text{post}(\sum_i f_i(\text{norm}_i(X))))$.

    GPT-2's block is `ResidualBlock(attention, norm=LN) >> ResidualBlock(feedforward, norm=LN)`. Branches in parallel are GPT-NeoX's,
    `after` is BERT's (Post-LN), `post` alone is OLMo 2's, and `norm` with `post` Gemma 2's.

    Both steps take a dictionary `seen`. They put into it what they have computed anyway: `seen["entropy"]`, [batch], the entropy of
    attention in nats, its mean over heads and queries. A block without attention leaves it as it is.

    Args:
        branches: an `AttentionBranch` or `FeedForwardBranch`, or several that are added up.
        norm: of what enters the branches: one for all, or one for each.
        post: of the branches' sum.
        after: of the block's result.
        lam, gamma: weights of the shortcut and of the branches.
    """

    branches: Branch | tuple[Branch, ...]
    norm: Norms = None
    post: Norm | None = None
    after: Norm | None = None
    lam: float = 1.0
    gamma: float = 1.0

    def __post_init__(self) -> None:
        branches = (self.branches,) if isinstance(self.branches, Branch) else self.branches
        if not (isinstance(branches, tuple | list) and branches and all(isinstance(branch, Branch) for branch in branches)):
            raise ValueError(f"branches must be a branch, such as FeedForwardBranch(…), or a tuple of branches, got {quote(self.branches)}")
        norms = tuple(self.norm) if isinstance(self.norm, tuple | list) else (self.norm,) * len(branches)
        if len(norms) != len(branches):
            raise ValueError(f"norm must be one, or one for each of the {len(branches)} branches, got {len(norms)}")
        for norm in norms:
            check_norm("norm", norm)
        check_norm("post", self.post)
        check_norm("after", self.after)
        keep(self, finite, "lam", "gamma", most=1e18)
        object.__setattr__(self, "branches", tuple(branches))
        object.__setattr__(self, "norm", norms)

    def limit(self) -> tuple[Term, ...]:
        raise NoLimit(
            f"{self!r} has no limit: the standard deviations of its weights do not depend on n, so the branches add gamma²·(their own "
            "covariance) - (1 - lam²)·V to V, an update of O(1)"
        )

    @property
    def pairs(self) -> Iterator[tuple[Branch, Norm | None]]:
        """The branches, each with the norm before it."""
        assert isinstance(self.branches, tuple)
        assert isinstance(self.norm, tuple)
        return zip(self.branches, self.norm, strict=True)

    @property
    def needs_tokens(self) -> bool:
        norms = (self.post, self.after, *(norm for _, norm in self.pairs))
        return any(norm is not None and norm.needs_features for norm in norms)

    def check_sizes(self, sizes: Sizes) -> None:
        if sizes.n_k is not None:
            for branch, _ in self.pairs:
                branch.check_keys(sizes.n_k)

    def count_entries(self, m: int) -> int:
        """The features that a branch draws, m for each, come in parts: sixteen parts of them count as much as a covariance does."""
        return max(m**2, *(m * branch.features // 16 for branch, _ in self.pairs))

    def advance_tokens(self, X: Tokens, sizes: Sizes, stream: Stream, seen: Seen | None = None) -> Tokens:
        entering = [Point(matrix=gram(X if norm is None else norm.apply(X))) for _, norm in self.pairs]
        F = factor(self.covariance(entering, sizes, stream, seen))
        update = F @ stream.normal(len(X), F.shape[-1], sizes.n)
        if self.post is not None:
            update = self.post.apply(update)
        X = torch.add(self.lam * X, update, alpha=self.gamma)
        return X if self.after is None else self.after.apply(X)

    def advance_gram(self, point: Point, sizes: Sizes, stream: Stream, seen: Seen | None = None) -> Point:
        """For RMSNorm, and for as many features as tokens or more. The update's part along X and its part across X are scaled together."""
        refuse_gram(self)
        V = point.V.contiguous()
        L = point.L.contiguous()
        entering = [point if norm is None else Point(matrix=norm.rescale(V)) for _, norm in self.pairs]
        F = factor(self.covariance(entering, sizes, stream, seen))
        beside, across = split_update(F, L, sizes.n, stream)
        if across is not None:
            beside = torch.cat([beside, across.mul_(1.0 / math.sqrt(sizes.n))], -1)
        if self.post is not None:
            beside = beside * self.post.scales(beside.square().sum(-1, keepdim=True))
        beside.mul_(self.gamma)[..., : L.shape[-1]].add_(L, alpha=self.lam)
        V = beside @ beside.mT
        return Point(matrix=match_layout(V if self.after is None else self.after.rescale(V), point.V))

    def covariance(self, entering: list[Point], sizes: Sizes, stream: Stream, seen: Seen | None) -> Covariance:
        """Of each feature of the branches' sum, over the tokens, given the covariances of what enters the branches."""
        found = [branch.covariance(one, sizes.n, stream) for (branch, _), one in zip(self.pairs, entering, strict=True)]
        entropies = [entropy for _, entropy in found if entropy is not None]
        if seen is not None and entropies:
            seen["entropy"] = torch.stack(entropies).mean(0)
        return reduce(add, (covariance for covariance, _ in found))

    def module(
        self, n: int, n_k: int | None = None, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None
    ) -> nn.Module:
        self.check_sizes(Sizes(n, n_k))
        branches = [branch.module(n, generator=generator, dtype=dtype) for branch, _ in self.pairs]
        norms = [None if norm is None else norm.module(n, dtype) for norm in (*(norm for _, norm in self.pairs), self.post, self.after)]
        return RandomBlock(branches, norms[:-2], norms[-2], norms[-1], self.lam, self.gamma)
