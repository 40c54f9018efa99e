"""Biases on the logits of attention: none, causal, a matrix for all heads, or one for each."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from shaped.checks import as_tensor, quote, whole_number
from shaped.nn.functional import logit_bias

Mask = str | Tensor | None
Rows = Float[Tensor, "rows m"]  # the rows of an m x m matrix, or one row to broadcast if all are equal


def check_mask(mask: Any, heads: int) -> Mask:
    """None, "causal", or a bias in double precision, [m, m] or [heads, m, m]: numbers, with -inf where a token is not attended to."""
    if mask is None or (isinstance(mask, str) and mask == "causal"):
        return mask
    if isinstance(mask, str):
        raise ValueError(f"mask must be None, 'causal' or a bias on the logits, [m, m] or [heads, m, m], got {quote(mask)}")
    bias = as_tensor("mask", mask).detach().clone()
    if bias.ndim not in (2, 3) or bias.shape[-1] != bias.shape[-2] or not bias.numel():
        raise ValueError(f"mask must be square, [m, m] or [heads, m, m], got shape {tuple(bias.shape)}")
    if bias.ndim == 3 and len(bias) != heads:
        raise ValueError(f"mask must have a bias for each of the {heads} heads, [{heads}, m, m], got shape {tuple(bias.shape)}")
    if bias.dtype == torch.bool:
        bias = torch.where(bias, 0.0, -torch.inf)
    if not bias.dtype.is_floating_point:
        raise ValueError(f"mask must hold booleans or floating point numbers, got {bias.dtype}")
    bias = bias.to("cpu", torch.float64)
    if (bias.isnan() | (bias == torch.inf)).any():
        raise ValueError("mask must hold numbers or -inf, got nan or +inf")
    empty = (bias == -torch.inf).all(-1).nonzero()
    if len(empty):
        raise ValueError(f"mask must leave every token something to attend to, got row {empty[0, -1].item()} with nothing")
    return bias


def head_masks(mask: Mask, heads: int) -> tuple[Mask, ...]:
    """The mask of each head."""
    if isinstance(mask, Tensor) and mask.ndim == 3:
        return tuple(bias.clone() for bias in mask)  # a clone: a view would send the biases of all heads to a worker
    return (mask,) * heads


def same_mask(one: Mask, other: Mask) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or (isinstance(one, str) and one == other)


def describe_mask(mask: Mask) -> str:
    return f"<{' x '.join(map(str, mask.shape))} bias>" if isinstance(mask, Tensor) else repr(mask)


def resting_attention(mask: Mask, m: int, like: Tensor) -> Rows:
    r"""$P = \text{softmax}(B)$ row by row: the attention of one head at zero logits, by which shaped attention is centred.

    Without a mask it is $11^\top/m$ (Eq. shaped-attention): one row is broadcast to all, and sums over it cost O(m²). For the causal mask
    it has 1/i in the first i entries of row i (below that equation).
    """
    if mask is None:
        return like.new_full((1, m), 1.0 / m)
    return torch.softmax(logit_bias(mask, m, like), -1)


def alibi(m: int, heads: int) -> Float[Tensor, "{heads} {m} {m}"]:
    """The biases of ALiBi (Press, Smith and Lewis 2022): causal, and in each head less by its slope for each token further back.

    The slopes are 2^(-8/heads), 2^(-16/heads), … for a power of two; for another number of heads those of the power of two below it, and
    every second one of the power above it.
    """
    m, heads = whole_number("m", m), whole_number("heads", heads)
    below = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (k + 1) / below) for k in range(below)]
    slopes += [2.0 ** (-4.0 * (2 * k + 1) / below) for k in range(heads - below)]
    place = torch.arange(m, dtype=torch.float64, device="cpu")
    back = place[:, None] - place
    back = back.masked_fill(back < 0, torch.inf)
    return -torch.tensor(slopes, dtype=torch.float64, device="cpu")[:, None, None] * back
