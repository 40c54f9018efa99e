"""Norms, and LayerNorm around a residual layer: before its branch (Pre-LN) or on its result (Post-LN). They have no limit here."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from shaped.checks import finite, in_range, keep, quote
from shaped.covariance import Matrix, Point
from shaped.layers.base import Layer, NoLimit, ResidualLayer, Sizes, Tokens
from shaped.layers.terms import Term
from shaped.nn.functional import layer_norm
from shaped.nn.networks import Residual
from shaped.nn.random_blocks import RandomNorm
from shaped.randomness import Stream

KINDS = ("layer", "rms", "dyt")


@dataclass(frozen=True)
class Norm:
    r"""A norm of each token, with one gain for all features.

    Args:
        kind: "layer" (LayerNorm), "rms" (RMSNorm) or "dyt", $g \tanh(\alpha x)$ (Zhu et al. 2025, "Transformers without Normalization").
        eps: is added to the variance or the mean square. DyT has none.
        gain: g.
        alpha: of DyT, and only of DyT.
    """

    kind: str
    eps: float | None = None
    gain: float = 1.0
    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {quote(self.kind)}")
        idle, used = ("eps", "alpha") if self.kind == "dyt" else ("alpha", "eps")
        if getattr(self, idle) is not None:
            raise ValueError(f"{idle} must be left out for {self.kind!r}, which has none, got {getattr(self, idle)!r}")
        if getattr(self, used) is None:
            object.__setattr__(self, used, {"eps": 1e-5, "alpha": 0.5}[used])
        keep(self, in_range, used, low=0.0, high=1e18)
        keep(self, finite, "gain", most=1e18)

    def apply(self, X: Tensor) -> Tensor:
        """The norm over the last dimension."""
        if self.alpha is not None:
            return (X * self.alpha).tanh_().mul_(self.gain)
        if self.kind == "layer":
            X = X - X.mean(-1, keepdim=True)
        return X * self.scales(X.square().mean(-1, keepdim=True))

    def scales(self, square: Tensor) -> Tensor:
        """What RMSNorm multiplies tokens of these mean squares by."""
        assert self.eps is not None
        return self.gain * (square + self.eps).rsqrt()

    def rescale(self, V: Matrix) -> Matrix:
        """The covariance of RMSNorm's tokens, from that of the tokens."""
        scales = self.scales(V.diagonal(dim1=-2, dim2=-1))
        return V * scales[..., :, None] * scales[..., None, :]

    @property
    def needs_features(self) -> bool:
        """RMSNorm sees only a token's length. The others see its single features."""
        return self.kind != "rms"

    def module(self, width: int, dtype: torch.dtype | None = None) -> nn.Module:
        """The norm as a module of PyTorch."""
        return RandomNorm(self.kind, width, self.eps, self.gain, self.alpha, dtype)


def check_norm(name: str, norm: object) -> None:
    if norm is not None and not isinstance(norm, Norm):
        raise ValueError(f"{name} must be None or a norm, such as Norm('rms'), got {quote(norm)}")


@dataclass(frozen=True)
class Normalise(Layer):
    """A norm by itself: on the embedding, or at the end."""

    norm: Norm

    def __post_init__(self) -> None:
        if not isinstance(self.norm, Norm):
            raise ValueError(f"norm must be a norm, such as Norm('rms'), got {quote(self.norm)}")

    def limit(self) -> tuple[Term, ...]:
        raise NoLimit(f"{self!r} has no limit: it changes the length of every token whatever the width is: an update of O(1)")

    @property
    def needs_tokens(self) -> bool:
        return self.norm.needs_features

    def advance_tokens(self, X: Tokens, sizes: Sizes, stream: Stream) -> Tokens:
        return self.norm.apply(X)

    def advance_gram(self, point: Point, sizes: Sizes, stream: Stream) -> Point:
        refuse_gram(self)
        return Point(matrix=self.norm.rescale(point.V))

    def module(
        self, n: int, n_k: int | None = None, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None
    ) -> nn.Module:
        return self.norm.module(Sizes(n, n_k).n, dtype)


def refuse_gram(layer: Layer) -> None:
    """Raises a ValueError for a layer that the covariance alone cannot advance."""
    if layer.needs_tokens:
        raise ValueError(f"path must be 'tokens' for {layer!r}, which looks at single features")


@dataclass(frozen=True)
class Normalised(Layer):
    layer: ResidualLayer
    place: ClassVar[str]

    def __post_init__(self) -> None:
        if not isinstance(self.layer, ResidualLayer):
            raise ValueError(f"layer must be a single layer with a skip connection, got {quote(self.layer)}")

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
