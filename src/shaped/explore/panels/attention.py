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


def draw_entropy_shares(attention: ShapedAttention, V: Tensor, asked: Question, breathe: Breathe, normalised: bool = False) -> Tensor:
    """The entropy over that of uniform attention, [time, sample], for covariances [time, sample, m, m] that enter the layer.

    Given the covariance, logits with fresh weights have the law of the network's own: the result's law at each layer is exact.
    `normalised`: the layer sees tokens after LayerNorm, whose covariance is their correlation up to O(1/n).
    """
    V = correlation(V) if normalised else V
    uniform = softmax_entropy(logit_bias(attention.mask, V.shape[-1], V)).mean().item()
    found = []
    for time, matrices in enumerate(V):
        found.append(attention.entropy(matrices, n=asked.width, seed=asked.seed + time))
        breathe(1)
    return torch.stack(found) / uniform
