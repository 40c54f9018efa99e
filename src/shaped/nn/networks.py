"""Random networks of the theory with explicit weights, all of them iid N(0, 1), as the paper writes them.

Tests check the weightless simulation against them. They compute the paper's equations and nothing else.
The keyword arguments `draw` go to `draw_weights`. `backpropagate` runs the same modules without weights: so each matrix is used once, as
`x @ W`, and its attribute's name is that of its gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shaped.nn.activations import Activation
from shaped.nn.functional import attention_matrix, layer_norm, logit_bias, rms_norm, rotate, rotation_of_places

X = Float[Tensor, "*batch m n"]


class RandomAttention(nn.Module):
    r"""$f(X) = [A_h X W^V_h/\sqrt{n}]_h$, then $W^O/\sqrt{n}$ if projected (Eq. model, Eq. Softmax-att).

    With `qk_norm` each query and key is divided by its root mean square. With `frequencies` both are rotated by their positions (RoPE).
    """

    def __init__(
        self,
        n: int,
        n_k: int,
        heads: int,
        project: bool,
        tau: float,
        gamma1: float,
        gamma2: float,
        mask: str | Tensor | None,
        qk_norm: bool = False,
        frequencies: tuple[float, ...] | None = None,
        **draw: Any,
    ):
        super().__init__()
        self.heads, self.tau, self.gamma1, self.gamma2 = heads, tau, gamma1, gamma2
        self.mask, self.qk_norm, self.frequencies = mask, qk_norm, frequencies
        self.query, self.key = draw_weights(n, heads * n_k, **draw), draw_weights(n, heads * n_k, **draw)
        self.value = draw_weights(n, n, **draw)
        self.output = draw_weights(n, n, **draw) if project else None

    @property
    def has_plain_logits(self) -> bool:
        """Do queries and keys enter by their inner products alone? A norm or rotary positions look at more."""
        return not self.qk_norm and self.frequencies is None

    @property
    def outlet(self) -> str | None:
        """The name of the matrix that makes the features of the result. Heads side by side have none: each makes its own features."""
        return "output" if self.output is not None else "value" if self.heads == 1 else None

    def forward(self, x: X) -> X:
        scale = 1.0 / math.sqrt(self.value.shape[-2])
        query, key, value = (
            (x @ weight * scale).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for weight in (self.query, self.key, self.value)
        )
        if self.qk_norm:
            # The theory adds nothing to the mean square: only a row of zeros stays as it is.
            query, key = (rms_norm(rows, torch.finfo(x.dtype).tiny) for rows in (query, key))
        if self.frequencies is not None:
            rotation = [part.to(x) for part in rotation_of_places(x.shape[-2], self.frequencies)]
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        # Subtract the first key from all keys. This does not change the softmax, but keeps the query's gradient accurate: when tokens
        # collapse, rounding errors of A's row sums times the keys' common part are larger than the gradient (Fig. gradients).
        key = key - key[..., :1, :]
        logits, bias = query @ key.mT / self.tau, logit_bias(self.mask, x.shape[-2], x)
        if isinstance(self.mask, Tensor):  # some queries may not see the first key: the same, with the first one that each sees
            first = bias.isfinite().int().argmax(-1, keepdim=True)
            logits = logits - logits.take_along_dim(first.expand(*logits.shape[:-1], 1), -1)
        A = attention_matrix(logits, bias, self.gamma1, self.gamma2)
        mixed = (A @ value).transpose(-2, -3).flatten(-2)
        return mixed if self.output is None else mixed @ self.output * scale


class RandomFeedForward(nn.Module):
    r"""$f(X) = \sigma_s(X W^{\text{pre}}/\sqrt{n})\sqrt{c/n}\,W^{\text{post}}$ (Eq. resnet)."""

    outlet = "second"
    """The name of the matrix that makes the features of the result."""

    def __init__(self, n: int, activation: Activation, **draw: Any):
        super().__init__()
        self.activation = activation
        self.first, self.second = draw_weights(n, n, **draw), draw_weights(n, n, **draw)

    def forward(self, x: X) -> X:
        n = self.first.shape[-2]
        return self.activation(x @ self.first / math.sqrt(n)) @ self.second * math.sqrt(self.activation.normaliser() / n)


class RandomPerceptron(nn.Module):
    r"""$X' = \sqrt{c}\,\sigma_s(X W/\sqrt{n})$."""

    def __init__(self, n: int, activation: Activation, **draw: Any):
        super().__init__()
        self.activation = activation
        self.first = draw_weights(n, n, **draw)

    def forward(self, x: X) -> X:
        return math.sqrt(self.activation.normaliser()) * self.activation(x @ self.first / math.sqrt(x.shape[-1]))


class Residual(nn.Module):
    r"""$X' = \lambda X + \gamma f(X)$; with LayerNorm before f (Pre-LN) or on the result (Post-LN)."""

    def __init__(self, branch: nn.Module, lam: float, gamma: float, norm: str | None = None):
        super().__init__()
        self.branch, self.lam, self.gamma, self.norm = branch, lam, gamma, norm

    def forward(self, x: X) -> X:
        y = self.lam * x + self.gamma * self.branch(layer_norm(x) if self.norm == "pre" else x)
        return layer_norm(y) if self.norm == "post" else y


def draw_weights(rows: int, columns: int, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A matrix of standard normals."""
    return nn.Parameter(torch.randn(rows, columns, generator=generator, dtype=dtype))
