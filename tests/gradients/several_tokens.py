r"""The limit of the gradients for several tokens (docs/gradients.md), and networks of growing width beside it.

    PYTHONPATH=tests/gradients python tests/gradients/several_tokens.py

D is the gradient with respect to the tokens X that leave a layer, $R = D D^\top$ and $C = D X^\top$. The layer before it takes both to those
of the tokens that enter it. `BackwardLimit` has the mean and the noise of this change, times n.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from one_token import OUTPUTS, describe, halved_square
from torch import Tensor

import shaped
from shaped.covariance import Point, factor
from shaped.layers.logits import softmax_derivative
from shaped.layers.masks import resting_attention
from shaped.layers.terms import WeightNoise
from shaped.randomness import GeneratorNormals
from shaped.testing.stats import generator, seed


UPPER = 50.0


def find_roots(left: Tensor, right: Tensor) -> Tensor:
    r"""The matrices N of which $\text{left}\,G\,\text{right}^\top$ is a sum with one normal each, [pair, ..., m, m].

    A quadratic function of the sum has the mean that its values at these matrices add up to.
    """
    pairs = ((i, j) for i in range(left.shape[-1]) for j in range(right.shape[-1]))
    return torch.stack([left[..., :, i : i + 1] * right[..., None, :, j] for i, j in pairs])


@dataclass(frozen=True)
class BackwardLimit:
    r"""Backward through one layer of shaped attention. N is $\sqrt{n}$ times the logits: in law $L G L^\top/\tau_0$ with $L L^\top = V$.

    Z is $D (X W)^\top/\sqrt{n}$ for the tokens X that enter and the values' matrix W.
    """

    gamma: float
    tau0: float
    mask: str | None = None

    @property
    def lam(self) -> float:
        return math.sqrt(1.0 - self.gamma**2)

    @property
    def weights(self) -> WeightNoise:
        return WeightNoise(self.gamma**2 * (2.0 - self.gamma**2))

    def rest(self, like: Tensor) -> Tensor:
        """P, the attention at zero logits."""
        return resting_attention(self.mask, like.shape[-1], like).expand(like.shape[-2:])

    def find_logit_roots(self, V: Tensor) -> Tensor:
        L = factor(V)
        return find_roots(L / self.tau0, L)

    def expand_softmax(self, N: Tensor) -> tuple[Tensor, Tensor]:
        """E and E2: the softmax's first and second order in N."""
        P = self.rest(N)
        E = softmax_derivative(P, N)
        centred = N - (P * N).sum(-1, keepdim=True)
        return E, softmax_derivative(P, centred.square()) / 2

    def differentiate_logits(self, Z: Tensor) -> Tensor:
        r"""$\Gamma$, the gradient with respect to logits that are zero."""
        return self.gamma * softmax_derivative(self.rest(Z), Z)

    def turn(self, E: Tensor, Z: Tensor, Gamma: Tensor, N: Tensor) -> Tensor:
        r"""The change of C, exactly: $\gamma(E^\top Z - Z E^\top) + \Gamma N^\top + \Gamma^\top N$."""
        return self.gamma * (E.mT @ Z - Z @ E.mT) + Gamma @ N.mT + Gamma.mT @ N

    def change_overlap(self, Z: Tensor, N: Tensor) -> Tensor:
        """The change of C to first order in N."""
        return self.turn(self.expand_softmax(N)[0], Z, self.differentiate_logits(Z), N)

    def drift_overlap(self, V: Tensor, C: Tensor) -> Tensor:
        """The mean change of C: its second order in N."""
        N = self.find_logit_roots(V)
        (E, E2), P, Z = self.expand_softmax(N), self.rest(V), self.gamma * C
        Z1 = Z @ (self.lam**2 * torch.linalg.solve(V, E @ V) - self.gamma**2 * E.mT)  # what N tells about Z, given C
        Gamma1 = self.gamma * (E * (Z - (P * Z).sum(-1, keepdim=True)) - P * (E * Z).sum(-1, keepdim=True))
        return (self.change_overlap(Z1, N) + self.turn(E2, Z, Gamma1, N)).sum(0)

    def pull(self, V: Tensor, R: Tensor, C: Tensor) -> Tensor:
        r"""The part of R's drift that linear layers have too: $\kappa(C V^{-1} C^\top - mR)$."""
        return self.weights.scale * (C @ torch.linalg.solve(V, C.mT) - V.shape[-1] * R)

    def drift_mixing(self, V: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
        r"""$\mathbb{E}\,E^\top R E$ and $\mathbb{E}\,E_2$. The drift of R by the values' way is $\gamma^2(\mathbb{E}E^\top R E + E_2^\top R + R E_2)$."""
        E, E2 = self.expand_softmax(self.find_logit_roots(V))
        return (E.mT @ R @ E).sum(0), E2.sum(0)

    def drift_mixing_forward(self, V):
        E, E2 = self.expand_softmax(self.find_logit_roots(V))
        return (E @ V @ E.mT).sum(0), E2.sum(0)

    def drift_logits(self, V: Tensor, R: Tensor, C: Tensor) -> Tensor:
        r"""The drift of R by the logits' way: $\mathbb{E}[\Gamma V\Gamma^\top + \Gamma^\top V\Gamma]/\tau_0^2$, where $\gamma C$ is Z's mean."""
        Z = torch.cat([(self.gamma * C)[None], find_roots(self.lam * factor(R), factor(V))])
        Gamma = self.differentiate_logits(Z) / self.tau0
        return (Gamma @ V @ Gamma.mT + Gamma.mT @ V @ Gamma).sum(0)

    def drift_size(self, V: Tensor, R: Tensor, C: Tensor) -> Tensor:
        """The mean change of R."""
        squared, second = self.drift_mixing(V, R)
        half = second.mT @ R
        return self.pull(V, R, C) + self.gamma**2 * (squared + half + half.mT) + self.drift_logits(V, R, C)


def solve_limit(limit: BackwardLimit, V0: Tensor, T: float, steps: int, samples: int, number: int, coupled: bool = True) -> dict[str, Tensor]:
    """Forward for V, whose logits N are kept, and back for R and C with the same N. The loss is `halved_square`.

    Not coupled: each layer's C is new, normal of covariance R ⊗ V.
    """
    normals, h, share = GeneratorNormals(generator(number), V0), T / steps, limit.gamma**2
    V, path = V0.expand(samples, *V0.shape), []
    stopped = torch.zeros(samples, dtype=torch.bool)
    for _ in range(steps):
        V = limit.weights.move(Point(matrix=V), h, normals).V
        L = factor(V)
        N = L @ normals.square(L) @ L.mT / limit.tau0
        squared, second = limit.drift_mixing_forward(V)
        path.append((V, N, second))
        M = torch.eye(V.shape[-1], dtype=V.dtype) + math.sqrt(h) * share * limit.expand_softmax(N)[0] + h * share * second
        V = M @ V @ M.mT + h * share * (1.0 - share) * squared
        stopped |= ~(V.diagonal(dim1=-2, dim2=-1).sum(-1) <= UPPER)
        V = torch.where(stopped[:, None, None], V0, V)
    outputs = factor(V) @ normals.normal(samples, V.shape[-1], OUTPUTS)
    R = C = outputs @ outputs.mT
    last = V
    for V, N, second in reversed(path):
        Xi = factor(R) @ normals.square(R) @ factor(V).mT
        if not coupled:
            C = factor(R) @ normals.square(R) @ factor(V).mT
        squared, _ = limit.drift_mixing(V, R)
        logits = limit.drift_logits(V, R, C)
        M = torch.eye(V.shape[-1], dtype=V.dtype) + math.sqrt(h) * share * limit.expand_softmax(N)[0] + h * share * second
        pull = limit.pull(V, torch.zeros_like(R), C)
        C = C + math.sqrt(h) * limit.change_overlap(share**0.5 * C - limit.lam * Xi, N) + h * limit.drift_overlap(V, C)
        R = M.mT @ R @ M + h * (share * (1.0 - share) * squared + logits)
        if coupled:
            R = math.exp(-limit.weights.scale * V.shape[-1] * h) * (R + h * pull)
        R = limit.weights.move(Point(matrix=R), h, normals).V
    size = R.diagonal(dim1=-2, dim2=-1).sum(-1)
    size[stopped] = torch.nan
    return {"gradient": size.log(), "loss": halved_square(outputs).log(), "V": last.diagonal(dim1=-2, dim2=-1).sum(-1).log()}
