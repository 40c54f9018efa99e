"""What ends a model: from its residual stream to logits, without the output matrix, and the loss of random labels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from shaped.gradients.products import Products, Tokens, draw_normals
from shaped.layers import Norm
from shaped.nn.activations.functions import FUNCTIONS

Labels = Int[Tensor, "batch place"]
Rows = Float[Tensor, "batch known n"]


@dataclass(frozen=True)
class Dense:
    """A square matrix, an activation and a norm before the output matrix: the head of masked language models."""

    std: float
    activation: str
    norm: Norm


@dataclass(frozen=True)
class Head:
    """Norm, `dense`, output matrix, soft cap. Its biases start at 0."""

    outputs: int
    """Columns of the output matrix: the vocabulary, or classes."""
    std: float
    """Of the output matrix's entries, with all factors of the logits."""
    norm: Norm | None = None
    dense: Dense | None = None
    softcap: float | None = None
    tied: bool = False
    """The output matrix is the table of the tokens."""
    is_classifier: bool = False
    """Only the first token has a label."""

    def draw_labels(self, batch: int, m: int, generator: torch.Generator) -> Labels:
        """Uniform and independent: one for each token, or one for the first."""
        shape = (batch, 1 if self.is_classifier else m)
        return torch.randint(self.outputs, shape, generator=generator, device=generator.device)

    def find_loss(self, labels: Labels, rows: Rows, X: Tokens, products: Products) -> Float[Tensor, " batch"]:
        """The mean cross-entropy of the tokens that have a label.

        `rows` are those of the table that are known already: the tokens'. A tied matrix has them, and they are its first columns. This
        order changes no law, as labels are uniform.
        """
        logits = self.find_logits(X[:, : labels.shape[1]], rows if self.tied else rows[:, :0], products)
        return nn.functional.cross_entropy(logits.mT, labels, reduction="none").mean(-1)

    def find_logits(self, X: Tokens, rows: Rows, products: Products) -> Float[Tensor, "batch place outputs"]:
        n = X.shape[-1]
        if self.norm is not None:
            X = self.norm.module(n, X.dtype).to(X.device)(X)
        if self.dense is not None:
            X = self.dense.std * products.multiply(X, "dense", partial(draw_normals, columns=n))
            X = self.dense.norm.module(n, X.dtype).to(X.device)(FUNCTIONS[self.dense.activation](X))
        unknown = self.outputs - rows.shape[1]
        parts = [X @ rows.mT] if rows.shape[1] else []
        parts += [products.multiply(X, "output", partial(draw_normals, columns=unknown))] if unknown else []
        logits = self.std * (parts[0] if len(parts) == 1 else torch.cat(parts, -1))
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
