"""The models of this package. Standard deviations, scales and gains are read from a block of the model itself, made without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shaped.hf.configuration import ShapedConfig
from shaped.hf.models import Embedding, make_block, make_norm
from shaped.hf.prediction.embeddings import TextEmbedding
from shaped.hf.prediction.parts import Network, make_head
from shaped.layers import AttentionBranch, FeedForwardBranch, Norm, ResidualBlock, Weights
from shaped.nn.blocks import ShapedTransformerBlock
from shaped.nn.modules import ShapedFeedForwardBlock, ShapedSelfAttention
from shaped.nn.norms import DyT


def describe_shaped(config: ShapedConfig, m: int) -> Network:
    with torch.device("meta"):
        block, tables = make_block(config), Embedding(config)
    rope = config.rope_base if config.positions == "rope" else None
    attention, feedforward = describe_attention(block.attention, rope), describe_feedforward(block.feedforward)
    if isinstance(block, ShapedTransformerBlock):
        start = block.start
        layers = (
            ResidualBlock(attention, lam=start["lam_attention"], gamma=start["gamma_attention"]),
            ResidualBlock(feedforward, lam=start["lam_feedforward"], gamma=start["gamma_feedforward"]),
        )
    else:
        norm = describe_norm(block.norm_attention)
        places: dict[str, Any] = {"norm": norm} if block.place == "pre" else {"after": norm}
        layers = ResidualBlock(attention, **places), ResidualBlock(feedforward, **places)
    std = config.choose_table_std()
    embedding = TextEmbedding(
        std,
        config.vocab_size,
        positions=0.0 if tables.positions is None else std,
        most=None if tables.positions is None else config.max_position_embeddings,
        types=0.0 if tables.types is None else std,
        norm=None if tables.norm is None else describe_norm(tables.norm),
    )
    # A tied matrix is scaled, so that logits are as with entries of `head_std`.
    last = describe_norm(make_norm(config)) if config.block in ("preln", "dyt") else None
    return Network(config.hidden_size, embedding, (layers,) * config.num_hidden_layers, make_head(config, config.choose_head_std(), last))


def describe_norm(norm: nn.Module) -> Norm:
    if isinstance(norm, DyT):
        return Norm("dyt", alpha=norm.start)
    if isinstance(norm, nn.LayerNorm):
        return Norm("layer", eps=norm.eps)
    assert isinstance(norm, nn.RMSNorm)
    return Norm("rms", eps=norm.eps)


def describe_attention(attention: ShapedSelfAttention, rope: float | None) -> AttentionBranch:
    gamma1, gamma2 = (0.0, 0.0) if attention.shaping is None else attention.shaping.start
    weights: dict[str, Any] = {name: read_weights(getattr(attention, name)) for name in ("query", "key", "value", "output")}
    return AttentionBranch(
        attention.heads,
        attention.query.out_features // attention.heads,
        **weights,
        scale=attention.scale,
        mask="causal" if attention.is_causal else None,
        qk_norm=None if attention.qk_eps is None else Norm("rms", eps=attention.qk_eps),
        rope=rope,
        gamma1=gamma1,
        gamma2=gamma2,
    )


def describe_feedforward(feedforward: ShapedFeedForwardBlock) -> FeedForwardBranch:
    pre, post = feedforward.pre, feedforward.post
    activation = feedforward.activation.plain if feedforward.slope is None else feedforward.activation.at(feedforward.width)
    return FeedForwardBranch(pre.out_features, read_weights(pre), read_weights(post), activation)


def read_weights(matrix: Any) -> Weights:
    """`init_normal` leaves the standard deviation beside the matrix."""
    return Weights(matrix.std)
