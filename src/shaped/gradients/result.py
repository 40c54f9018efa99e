"""Gradients: what `backpropagate` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Gradients:
    """Squared norms of the gradients of each network's loss. They are nan for a network that stopped."""

    t: Float[Tensor, " time"]
    """Layer over width, for layers 0 to d."""
    tokens: Float[Tensor, "time sample"]
    """With respect to the tokens that enter each layer, and those that leave the last one."""
    weights: dict[str, Float[Tensor, "layer sample"]]
    """With respect to each matrix of a layer. Its entries are standard normals, as in `layer.module(n)`: the product is scaled."""
    entries: dict[str, int]
    """The number of entries of each matrix."""
    loss: Float[Tensor, " sample"]
    V: Float[Tensor, "sample m m"]
    """Covariance of the tokens that leave the last layer; where a network stopped, that of its last finite tokens."""
    stopped: Float[Tensor, " sample"]
    """Time at which a network's tokens left the range; inf where they never did."""
    info: dict[str, Any] = field(default_factory=dict)

    def per_entry(self, name: str) -> Float[Tensor, "layer sample"]:
        """Squared gradients of a matrix, their mean over its entries."""
        if name not in self.weights:
            raise ValueError(f"name must be one of {', '.join(map(repr, self.weights))}, got {name!r}")
        return self.weights[name] / self.entries[name]

    def __repr__(self) -> str:
        facts = ", ".join(f"{key}={value!r}" for key, value in self.info.items())
        stopped = int(self.stopped.isfinite().sum())
        return (
            f"Gradients({len(self.t) - 1} layers, {len(self.loss)} samples, weights {', '.join(self.weights)}, {stopped} stopped, {facts})"
        )
