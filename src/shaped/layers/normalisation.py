"""LayerNorm around a residual layer: before its branch (Pre-LN) or on its result (Post-LN). They have no limit here."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from shaped.covariance import Point
from shaped.layers.base import Layer, NoLimit, ResidualLayer, Sizes, Tokens
from shaped.layers.terms import Term
from shaped.nn.functional import layer_norm
from shaped.nn.networks import Residual
from shaped.randomness import Stream


@dataclass(frozen=True)
class Normalised(Layer):
    layer: ResidualLayer
    place: ClassVar[str]

    def __post_init__(self) -> None:
        if not isinstance(self.layer, ResidualLayer):
            raise ValueError(f"layer must be a single layer with a skip connection, got {self.layer!r}")

    @property
    def needs_tokens(self) -> bool:
        return True  # LayerNorm needs the mean of each token's features, which the covariance does not determine

    def check_sizes(self, sizes: Sizes) -> None:
        self.layer.check_sizes(sizes)

    def advance_gram(self, point: Point, sizes: Sizes, stream: Stream) -> Point:
        raise ValueError(f"path must be 'tokens' for {self!r}: LayerNorm looks at single features")

    def module(
        self, n: int, n_k: int | None = None, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None
    ) -> nn.Module:
        inner = self.layer.module(n, n_k, generator=generator, dtype=dtype)
        assert isinstance(inner, Residual)
        return Residual(inner.branch, inner.lam, inner.gamma, self.place)

    @abstractmethod
    def advance_tokens(self, X: Tokens, sizes: Sizes, stream: Stream) -> Tokens: ...


@dataclass(frozen=True)
class PreLN(Normalised):
    r"""$X' = \lambda X + \gamma f(\text{LN}(X))$; the vanilla Pre-LN Transformer has $\lambda = \gamma = 1$ (Sec. 2)."""

    place: ClassVar[str] = "pre"

    def advance_tokens(self, X: Tokens, sizes: Sizes, stream: Stream) -> Tokens:
        return self.layer.shortcut * X + self.layer.gamma * self.layer.update(layer_norm(X), sizes, stream)

    def limit(self) -> tuple[Term, ...]:
        raise NoLimit(
            f"{self!r} has no limit: the branch sees LN(X), not X, and so adds gamma²·(its own covariance) - (1 - lam²)·V to V, "
            "an update of O(1)"
        )


@dataclass(frozen=True)
class PostLN(Normalised):
    r"""$X' = \text{LN}(\lambda X + \gamma f(X))$, the original Transformer's block."""

    place: ClassVar[str] = "post"

    def advance_tokens(self, X: Tokens, sizes: Sizes, stream: Stream) -> Tokens:
        return layer_norm(self.layer.advance_tokens(X, sizes, stream))

    def limit(self) -> tuple[Term, ...]:
        raise NoLimit(f"{self!r} has no limit: LN brings every token to length 1, whatever V was: an update of O(1)")
