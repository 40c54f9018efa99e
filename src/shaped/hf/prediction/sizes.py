"""The sizes of a model's residual stream, attention and feed-forward layers, read from its config."""

from __future__ import annotations

from typing import Any

import torch

from shaped.hf.configuration import ShapedConfig
from shaped.hf.prediction.families import describe_network, read_config
from shaped.layers import AttentionBranch, FeedForwardBranch


def read_sizes(config: Any, m: int) -> dict[str, Any]:
    """The arguments of `shaped.advise` for a shaped model of this size: n, d, m, heads, mask, qk_norm, rope, hidden; c_minus of our blocks.

    What a family has beside them (norms, gates, grouped keys, windows, other kinds of QK-norm) is not read: it is no part of a shaped
    model. Frequencies of RoPE that do not come from a base are read as such.
    """
    config = read_config(config)
    with torch.device("cpu"):  # not on the caller's default device
        network = describe_network(config, m)
    branches = [branch for layer in network.blocks[0] for branch, _ in layer.pairs]
    attention = next(branch for branch in branches if isinstance(branch, AttentionBranch))
    feedforward = next(branch for branch in branches if isinstance(branch, FeedForwardBranch))
    if attention.heads * attention.head_width != network.width:
        got = f"{attention.heads} heads of {attention.head_width} features for {network.width}"
        raise ValueError(f"config must have heads that share the width, as shaped models do, got {got}")
    if isinstance(attention.rope, tuple) and 2 * len(attention.rope) != attention.head_width:
        got = f"{2 * len(attention.rope)} of {attention.head_width}"
        raise ValueError(f"config must rotate all features of each head or none, as shaped models do, got {got}")
    ours = isinstance(config, ShapedConfig) and config.block == "shaped"
    if ours and config.activation != "relu":
        raise ValueError(f"activation must be 'relu', the one that advise knows, got {config.activation!r}")
    return ({"c_minus": config.c_minus} if ours else {}) | {
        "n": network.width,
        "d": len(network.blocks),
        "m": m,
        "heads": attention.heads,
        "mask": attention.mask,
        "qk_norm": attention.qk_norm is not None,
        "rope": attention.rope,
        "hidden": feedforward.hidden,
    }
