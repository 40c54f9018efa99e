"""Shaped attention from the one product that computes queries, keys and values: what its kernels for short and for long sequences share."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from shaped.kernels import attention_correction

T = TypeVar("T")


class MixingGains(NamedTuple, Generic[T]):
    """Something for each gain between the two products of an attention branch: its value, or the terms of its gradient.

    The output is gain · (softmax + gamma1·I - gamma2·R) v, where R is the attention at zero logits. `query` and `key` are the trained
    gains of QK-norm, vectors of the features of a head; None without them.
    """

    gamma1: T
    gamma2: T
    gain: T
    query: T | None = None
    key: T | None = None


def reference(
    qkv: Tensor,
    gamma1: Tensor | float,
    gamma2: Tensor | float,
    heads: int,
    scale: float,
    qk_eps: float | None = None,
    causal: bool = False,
    rotation: tuple[Tensor, Tensor] | None = None,
    qk_gains: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Shaped attention of queries, keys and values in one tensor, [batch, m, 3 · heads · D], in plain PyTorch."""
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
    if qk_eps is not None:
        q, k = (rms_norm(x, x.shape[-1:], eps=qk_eps) for x in (q, k))
    if qk_gains is not None:
        q, k = q * qk_gains[0], k * qk_gains[1]
    if rotation is not None:
        q, k = (_rotate(x, *rotation) for x in (q, k))
    return attention_correction.reference(q, k, v, gamma1, gamma2, scale, causal).transpose(1, 2).flatten(-2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)
