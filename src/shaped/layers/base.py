"""Layer, Chain and NoLimit: what every layer of the theory has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property, reduce
from operator import add

import torch

from shaped.covariance import Matrix, Point, check_covariance
from shaped.layers.terms import Dense, Term, collected
from shaped.randomness import GeneratorNormals


class NoLimit(ValueError):
    """A layer whose update of the covariance is not O(1/n): it has no covariance SDE."""


class Layer(ABC):
    """A layer of the theory. `a >> b` is the network that applies a, then b; its limit is the sum of theirs."""

    @abstractmethod
    def limit(self) -> tuple[Term, ...]:
        """The terms of the layer's covariance SDE; raises NoLimit where there is none."""

    def __rshift__(self, other: Layer) -> Chain:
        return Chain(*self.layers, *other.layers)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return (self,)

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        return collected(self.limit())

    def drift(self, V: Matrix) -> Matrix:
        r"""$b(V)$ of $dV = b(V)\,dt + \Sigma(V)^{1/2}\,dB$, in O(m³) time and O(m²) memory a sample."""
        _check_shape(V)
        return reduce(add, (term.drift(V) for term in self.terms))

    def noise(self, V: Matrix, generator: torch.Generator) -> Matrix:
        r"""One draw of a symmetric matrix whose upper triangle has covariance $\Sigma(V)$, in O(m³) time."""
        check_covariance(V, "V")
        point, normals = Point(matrix=V), GeneratorNormals(generator)
        return reduce(add, (term.noise(point, normals) for term in self.terms))

    def Sigma(self, V: Matrix) -> Dense:
        r"""The dense $\Sigma(V)$, [..., p, p] with p = m(m+1)/2, upper triangle row by row. For small m: O(m⁴) memory."""
        _check_shape(V)
        return reduce(add, (term.Sigma(V) for term in self.terms))


class Chain(Layer):
    """Layers applied one after another, as made by `>>`."""

    def __init__(self, *layers: Layer):
        if not layers:
            raise ValueError("layers must not be empty: a Chain needs at least one layer")
        self._layers = tuple(inner for layer in layers for inner in layer.layers)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self._layers

    def limit(self) -> tuple[Term, ...]:
        """Cor. full_transformer: stacking layers adds their drifts and the covariances of their noises."""
        return tuple(term for layer in self._layers for term in layer.limit())

    def __repr__(self) -> str:
        return " >> ".join(map(repr, self._layers))


def _check_shape(V: torch.Tensor) -> None:
    if V.ndim < 2 or V.shape[-1] != V.shape[-2] or V.shape[-1] == 0:
        raise ValueError(f"V must be square, [..., m, m], got shape {tuple(V.shape)}")


def check_residual(gamma: float) -> None:
    """gamma is the residual branch's share; the shortcut lam = sqrt(1 - gamma²) takes the rest."""
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
