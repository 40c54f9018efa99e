"""Rotary positions (RoPE, Su et al. 2021): queries and keys are rotated, so that logits depend on differences of positions alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shaped.nn import functional

ROPE_BASE = 10_000.0
POSITIONS = ("learned", "rope")  # how a model knows them: a table that is added to the embedding, or rotated queries and keys


class Rotation(NamedTuple):
    """Cosines and sines of the angles of each token, [batch or 1, m, E/2] for heads of E features. All layers share one."""

    cos: Tensor
    sin: Tensor


def make_rotation(positions: Int[Tensor, "batch m"], features: int, base: float = ROPE_BASE) -> Rotation:
    r"""The angles $p\,\text{base}^{-2i/E}$ of a token at position p, for i = 0 … E/2 - 1. In float32."""
    if features % 2:
        raise ValueError(f"features must be even, since they are rotated in pairs, got {features}")
    angles = positions[..., None].float() * functional.rotary_frequencies(features, base, torch.float32, positions.device)
    return Rotation(angles.cos(), angles.sin())


def check_rope(positions: str, rope_base: float, key_width: int) -> None:
    """Refuses a base that would be ignored, and heads that cannot be rotated."""
    if positions != "rope" and rope_base != ROPE_BASE:
        raise ValueError(f"rope_base must be {ROPE_BASE:g}, its default, for {positions} positions, got {rope_base}")
    if positions == "rope" and key_width % 2:
        raise ValueError(f"heads must have an even width for rope, which rotates pairs of features, got {key_width}")


def rotate(x: Float[Tensor, "batch heads m E"], rotation: Rotation) -> Float[Tensor, "batch heads m E"]:
    """Rotates features i and i + E/2 by the i-th angle of their token: the layout of transformers' Llama. Computed in float32."""
    cos, sin = (table[:, None] for table in rotation)
    return functional.rotate(x, cos, sin)
