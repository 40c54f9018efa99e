"""Layer, Chain and NoLimit: what every layer of the theory has in common.

A layer has three faces: its limit (`limit`, `drift`, `noise`, `Sigma`), its law (`advance_gram`, `advance_tokens`: one step of a random
network of finite width, exact in law and drawn without its weights) and its `module`, with explicit weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shaped.checks import as_tensor, in_range, keep, quote, whole_number
from shaped.covariance import Matrix, Point, check_covariance, check_symmetric, factor, gram, product
from shaped.layers.terms import Dense, Term, merge_terms
from shaped.randomness import GeneratorNormals, Stream

Tokens = Float[Tensor, "batch m n"]
Factor = Float[Tensor, "batch m k"]


class NoLimit(ValueError):
    """A layer whose update of the covariance does not shrink with the width: it has no covariance SDE."""


@dataclass(frozen=True)
class Sizes:
    """Width n of a finite network and width n_k of each head's keys (None: n divided by the number of heads)."""

    n: int
    n_k: int | None = None

    def __post_init__(self) -> None:
        keep(self, whole_number, "n", "n_k")

    def check_tokens(self, m: int) -> None:
        """Raises a ValueError if m tokens are more than the features."""
        if self.n < m:
            raise ValueError(f"n must be at least {m}, the number of tokens: fewer features cannot have every covariance, got {self.n}")

    def keys(self, heads: int) -> int:
        """n_k, or its default for this number of heads."""
        return self.n // heads if self.n_k is None else self.n_k


def count_at_once(device: torch.device) -> int:
    """How many features are drawn at once: on a CPU so few that they stay in its cache, on a GPU so many that its products are fast."""
    return 2**16 if device.type == "cpu" else 2**26


class Layer(ABC):
    """A layer of the theory. `a >> b` is the network that applies a, then b; its limit is the sum of theirs."""

    @abstractmethod
    def limit(self) -> tuple[Term, ...]:
        """The terms of the layer's covariance SDE; raises NoLimit where there is none."""

    def __rshift__(self, other: Layer) -> Chain:
        if not isinstance(other, Layer):
            return NotImplemented
        return Chain(*self.layers, *other.layers)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers that this one is a chain of: itself, unless it is a `Chain`."""
        return (self,)

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """Those of `limit`, as few as have the same sum."""
        return merge_terms(self.limit())

    def drift(self, V: Matrix) -> Matrix:
        r"""$b(V)$ of $dV = b(V)\,dt + \Sigma(V)^{1/2}\,dB$, in O(m³) time and O(m²) memory a sample."""
        V = as_tensor("V", V)
        check_symmetric(V, "V")
        return reduce(add, (term.drift(V) for term in self.terms))

    def noise(self, V: Matrix, generator: torch.Generator) -> Matrix:
        r"""One draw of a symmetric matrix whose upper triangle has covariance $\Sigma(V)$, in O(m³) time."""
        V = as_tensor("V", V)
        check_covariance(V, "V")
        if not isinstance(generator, torch.Generator):
            raise ValueError(f"generator must be a torch.Generator, such as torch.Generator().manual_seed(0), got {quote(generator)}")
        point, normals = Point(matrix=V), GeneratorNormals(generator, V)
        return reduce(add, (term.noise(point, normals) for term in self.terms))

    def Sigma(self, V: Matrix) -> Dense:
        r"""The dense $\Sigma(V)$, [..., p, p] with p = m(m+1)/2, upper triangle row by row. For small m: O(m⁴) memory."""
        V = as_tensor("V", V)
        check_symmetric(V, "V")
        return reduce(add, (term.Sigma(V) for term in self.terms))

    @property
    def needs_tokens(self) -> bool:
        """Does a step use single features? Then the covariance does not determine the law of the next one."""
        return False

    def check_sizes(self, sizes: Sizes) -> None:
        """Raises a ValueError for widths that the layer cannot have. Most layers accept all."""
        return

    def count_entries(self, m: int) -> int:
        """The size of a sample's step, in numbers. The larger it is, the fewer samples are advanced together."""
        return m**2

    @abstractmethod
    def advance_tokens(self, X: Tokens, sizes: Sizes, stream: Stream) -> Tokens:
        """The next layer's tokens, given these."""

    @abstractmethod
    def advance_gram(self, point: Point, sizes: Sizes, stream: Stream) -> Point:
        """The next layer's covariance, given this one. Only where `needs_tokens` is False."""

    @abstractmethod
    def module(
        self, n: int, n_k: int | None = None, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None
    ) -> nn.Module:
        """The layer with explicit weights, for tokens [..., m, n]; at initialisation it has the law of `advance_tokens`."""


class ResidualLayer(Layer):
    r"""$X' = \lambda X + \gamma f(X)$, where each feature of $f(X)$ is, given V, normal with covariance $F F^\top$ over the tokens.

    A subclass only draws F (`branch`).
    """

    gamma: float
    lam: float | None
    """Weight of the shortcut; None is sqrt(1 - gamma²), which keeps the covariance (Sec. 2)."""

    @property
    def shortcut(self) -> float:
        """The weight of the shortcut: `lam`, or its default."""
        return math.sqrt(1.0 - self.gamma**2) if self.lam is None else self.lam

    @abstractmethod
    def branch(self, L: Factor, sizes: Sizes, stream: Stream) -> tuple[Factor, ...]:
        """A draw of F for each slice of the features: one slice a head without projection, else one slice. Slices have equal widths."""

    def advance_tokens(self, X: Tokens, sizes: Sizes, stream: Stream) -> Tokens:
        return self.shortcut * X + self.gamma * self.update(X, sizes, stream)

    def update(self, X: Tokens, sizes: Sizes, stream: Stream) -> Tokens:
        """f(X)."""
        slices = self.branch(factor(gram(X)), sizes, stream)
        width = sizes.n // len(slices)
        return torch.cat([F @ stream.matrices(X, F.shape[-1], width) for F in slices], -1)

    def advance_gram(self, point: Point, sizes: Sizes, stream: Stream) -> Point:
        r"""$V' = R R^\top + \frac{\gamma^2}{n} (F T)(F T)^\top$, $R = \lambda L + \gamma F G/\sqrt{n}$ (`split_update`)."""
        L = point.L
        (F,) = self.branch(L, sizes, stream)
        beside, across = split_update(F, L, sizes.n, stream, self.gamma)
        beside.add_(L, alpha=self.shortcut)
        V = product(beside, beside.mT)
        if across is not None:
            V = V.add_(product(across, across.mT), alpha=self.gamma**2 / sizes.n)
        return Point(matrix=V)

    def check_shortcut(self) -> None:
        """Raises NoLimit unless lam² + gamma² = 1, which keeps the covariance."""
        total = self.shortcut**2 + self.gamma**2
        if abs(total - 1.0) > 1e-9:
            raise NoLimit(
                f"{self!r} has no limit: lam² + gamma² = {total:.4g} is not 1, so each layer multiplies V by about that, an update of O(1)"
            )


def split_update(F: Factor, L: Factor, n: int, stream: Stream, gamma: float = 1.0) -> tuple[Factor, Factor | None]:
    r"""F Z, Z of n columns, along X and across X: $\gamma F G/\sqrt{n}$, and F T, T of Bartlett for n - m degrees (None for n = m).

    With $X = \sqrt{n} L O$, where O has orthonormal rows, F Z meets X only through $G = Z O^\top$; the rest of Z is orthogonal to X and
    enters by its Gram matrix, which is Wishart.
    """
    m, k = F.shape[-2:]
    G = stream.matrices(L, k, m).mul_(gamma / math.sqrt(n))
    return product(F, G), product(F, stream.bartlett(L, k, n - m)) if n > m else None


class Chain(Layer):
    """Layers applied one after another, as made by `>>`."""

    def __init__(self, *layers: Layer):
        if not layers:
            raise ValueError("layers must not be empty: a Chain needs at least one layer")
        for layer in layers:
            check_layer(layer)
        self._layers = tuple(inner for layer in layers for inner in layer.layers)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self._layers

    def limit(self) -> tuple[Term, ...]:
        """Cor. full_transformer: stacking layers adds their drifts and the covariances of their noises."""
        return tuple(term for layer in self._layers for term in layer.limit())

    @property
    def needs_tokens(self) -> bool:
        return any(layer.needs_tokens for layer in self._layers)

    def check_sizes(self, sizes: Sizes) -> None:
        for layer in self._layers:
            layer.check_sizes(sizes)

    def count_entries(self, m: int) -> int:
        return max(layer.count_entries(m) for layer in self._layers)

    def advance_tokens(self, X: Tokens, sizes: Sizes, stream: Stream) -> Tokens:
        for layer in self._layers:
            X = layer.advance_tokens(X, sizes, stream)
        return X

    def advance_gram(self, point: Point, sizes: Sizes, stream: Stream) -> Point:
        for layer in self._layers:
            point = layer.advance_gram(point, sizes, stream)
        return point

    def module(
        self, n: int, n_k: int | None = None, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None
    ) -> nn.Module:
        return nn.Sequential(*(layer.module(n, n_k, generator=generator, dtype=dtype) for layer in self._layers))

    def __repr__(self) -> str:
        return " >> ".join(map(repr, self._layers))


def check_layer(layer: object) -> None:
    if not isinstance(layer, Layer):
        raise ValueError(f"layer must be a layer, such as ShapedAttention(0.5), or several joined with >>, got {quote(layer)}")


def keep_weights(layer: ResidualLayer) -> None:
    """Checks the weights of the branch and of the shortcut."""
    keep(layer, in_range, "gamma", "lam", low=0.0, high=1.0)
