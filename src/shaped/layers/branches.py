"""What a residual branch of a Transformer in use is made of: weights of any standard deviation, and feed-forward layers, also gated."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shaped.checks import check_bool, in_range, keep, quote, whole_number
from shaped.covariance import Point
from shaped.layers.base import count_at_once
from shaped.nn.activations import Activation
from shaped.nn.activations.functions import FUNCTIONS
from shaped.nn.random_blocks import RandomMLP
from shaped.randomness import Stream

Covariance = Float[Tensor, "batch m m"]
Rows = Float[Tensor, "batch m k"]
Entropy = Float[Tensor, " batch"]


@dataclass(frozen=True)
class Weights:
    r"""Gaussian weights of a product $Y W + b$: `std` is the standard deviation of W's entries (no $1/\sqrt{n}$), `bias` that of b's."""

    std: float
    bias: float = 0.0

    def __post_init__(self) -> None:
        keep(self, in_range, "std", "bias", low=0.0, high=1e18)

    def rows(self, L: Covariance, n: int) -> Rows:
        r"""F with $F F^\top = \sigma^2 Y Y^\top + \sigma_b^2 11^\top$, for $Y Y^\top = n L L^\top$. $Y W + b$ has the law of F Z, Z normal.

        The bias is one more feature, the first, which is the same for all tokens.
        """
        F = L * (self.std * math.sqrt(n))
        return F if self.bias == 0.0 else torch.cat([torch.full_like(F[..., :1], self.bias), F], -1)

    def covariance(self, K: Covariance) -> Covariance:
        r"""$\sigma^2 K + \sigma_b^2 11^\top$: the covariance over the tokens of each feature of $Y W + b$, for $K = Y Y^\top$."""
        return K * self.std**2 + self.bias**2


class Branch(ABC):
    """f(Y), whose last product is with Gaussian weights: given Y, its features are iid, and normal over the tokens."""

    @abstractmethod
    def covariance(self, entering: Point, n: int, stream: Stream) -> tuple[Covariance, Entropy | None]:
        r"""A draw of the covariance over the tokens of each feature of f(Y), given $Y Y^\top/n$, and the entropies of attention."""

    @property
    @abstractmethod
    def features(self) -> int:
        """How many features the branch draws for a token, about."""

    def check_keys(self, n_k: int) -> None:
        """Raises a ValueError if n_k is not the width of the branch's keys. Most branches have none."""
        return

    @abstractmethod
    def module(self, n: int, **draw: Any) -> nn.Module:
        """The branch with explicit weights, for tokens of width n."""


@dataclass(frozen=True)
class FeedForwardBranch(Branch):
    r"""$f(Y) = \phi(Y W + b)\,W' + b'$, or gated, $(\phi(Y W + b) \circ (Y U + c))\,W' + b'$ (SwiGLU, GeGLU).

    Args:
        hidden: number of hidden features.
        inner: the weights W, and U if gated.
        outer: the weights W'.
        activation: "relu", "gelu", "gelu_tanh", "silu", "tanh", "relu2", or an `Activation`, whose normaliser is not applied.
        gated: multiply by a second product.
    """

    hidden: int
    inner: Weights
    outer: Weights
    activation: str | Activation = "gelu"
    gated: bool = False

    def __post_init__(self) -> None:
        keep(self, whole_number, "hidden")
        keep(self, check_bool, "gated")
        check_weights("inner", self.inner)
        check_weights("outer", self.outer)
        if not isinstance(self.activation, Activation) and self.activation not in FUNCTIONS:
            raise ValueError(f"activation must be one of {', '.join(map(repr, FUNCTIONS))}, or an Activation, got {quote(self.activation)}")

    @property
    def features(self) -> int:
        return (1 + self.gated) * self.hidden

    @property
    def function(self) -> Callable[[Tensor], Tensor]:
        """The activation as a function of single features."""
        return FUNCTIONS[self.activation] if isinstance(self.activation, str) else self.activation

    def covariance(self, entering: Point, n: int, stream: Stream) -> tuple[Covariance, None]:
        F = self.inner.rows(entering.L, n).contiguous()
        return self.outer.covariance(self.hidden_gram(F, stream)), None

    def hidden_gram(self, F: Rows, stream: Stream) -> Covariance:
        r"""A draw of $H H^\top$, $H = \phi(F Z)$ or $\phi(F Z) \circ F Z'$. The features are drawn in parts that fit into the cache."""
        batch, m, k = F.shape
        K, phi = F.new_zeros(batch, m, m), self.function
        budget = count_at_once(F.device)
        width = min(self.hidden, max(1, budget // m))
        few = max(1, budget // (m * width))
        for first in range(0, batch, few):
            part = F[first : first + few]
            if few == 1 and F.device.type == "cpu":
                self.add_gram(K[first], part[0], width, stream)
                continue
            for start in range(0, self.hidden, width):
                shape = (len(part), k, min(width, self.hidden - start))
                H = phi(part @ stream.normal(*shape))
                if self.gated:
                    H.mul_(part @ stream.normal(*shape))
                K[first : first + few].baddbmm_(H, H.mT)
        return K

    def add_gram(self, K: Float[Tensor, "m m"], F: Float[Tensor, "m k"], width: int, stream: Stream) -> None:
        r"""K is 0 and becomes $H H^\top$ of one sample. A quarter of each product is left out: F is triangular, and K symmetric."""
        m, k = F.shape
        half, phi = m // 2, self.function
        seen = k - m + half  # columns of F that the first half of the tokens sees
        first, second = F[:half, :seen].T.contiguous(), F[half:].T.contiguous()
        Z, G, U = F.new_empty(width, k), F.new_empty(width, m), F.new_empty(width, m)

        def draw(out: Float[Tensor, "width m"]) -> Float[Tensor, "width m"]:
            noise = stream.fill(Z[: len(out)])
            torch.mm(noise[:, :seen], first, out=out[:, :half])
            torch.mm(noise, second, out=out[:, half:])
            return out

        for start in range(0, self.hidden, width):
            count = min(width, self.hidden - start)
            H = phi(draw(G[:count]))
            if self.gated:
                H.mul_(draw(U[:count]))
            one, other = H[:, :half], H[:, half:]
            K[:half, :half].addmm_(one.T, one)
            K[half:].addmm_(other.T, H)
        K[:half, half:] = K[half:, :half].T

    def module(self, n: int, **draw: Any) -> nn.Module:
        inner, outer = ((weights.std, weights.bias) for weights in (self.inner, self.outer))
        return RandomMLP(n, self.hidden, inner, outer, self.function, self.gated, **draw)


def check_weights(name: str, weights: object) -> None:
    if not isinstance(weights, Weights):
        raise ValueError(f"{name} must be weights, such as Weights(std=0.02), got {quote(weights)}")
