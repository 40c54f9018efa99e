"""Entropy of attention at the layers of a trajectory."""

from __future__ import annotations

import torch
from torch import Tensor

from shaped.covariance import correlation
from shaped.explore.fields import Question
from shaped.explore.panels.unit import Breathe
from shaped.layers import ShapedAttention
from shaped.nn.diagnostics import softmax_entropy
from shaped.nn.functional import logit_bias

ENTRIES = 2**20
"""Of the attention matrices that are drawn at once. More would take longer than a cancelled question may."""


def draw_entropy_shares(attention: ShapedAttention, V: Tensor, asked: Question, breathe: Breathe, normalised: bool = False) -> Tensor:
    """The entropy over that of uniform attention, [time, sample], for covariances [time, sample, m, m] that enter the layer.

    Given the covariance, logits with fresh weights have the law of the network's own: the result's law at each layer is exact.
    `normalised`: the layer sees tokens after LayerNorm, whose covariance is their correlation up to O(1/n).
    """
    V = correlation(V) if normalised else V
    times, samples, m, _ = V.shape
    uniform = softmax_entropy(logit_bias(attention.mask, m, V)).mean().item()
    together = max(1, ENTRIES // (samples * m**2 * attention.heads))
    found = []
    for first in range(0, times, together):
        part = V[first : first + together]
        found.append(attention.entropy(part.flatten(0, 1), n=asked.width, seed=asked.seed + first).unflatten(0, part.shape[:2]))
        breathe(1)
    return torch.cat(found) / uniform
