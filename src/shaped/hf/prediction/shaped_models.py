"""The models of this package. Standard deviations, scales and gains are read from a block of the model itself, made without memory."""

from __future__ import annotations

import torch

from shaped.hf.configuration import ShapedConfig
from shaped.hf.models import make_block
from shaped.hf.prediction.embeddings import TextEmbedding
from shaped.hf.prediction.parts import Network
from shaped.layers import AttentionBranch, FeedForwardBranch, Norm, ResidualBlock, Weights
from shaped.nn.blocks import LayerNormBlock
from shaped.nn.modules import ShapedFeedForwardBlock, ShapedSelfAttention


def describe_shaped(config: ShapedConfig, m: int) -> Network:
    with torch.device("meta"):
        block = make_block(config)
    norm = Norm("layer", eps=torch.nn.LayerNorm(1).eps)
    attention, feedforward = describe_attention(block.attention), describe_feedforward(block.feedforward)
    if isinstance(block, LayerNormBlock):
        places = {"norm": norm} if block.place == "pre" else {"after": norm}
        made = ResidualBlock(attention, **places), ResidualBlock(feedforward, **places)
    else:
        start = block.start
        made = (
            ResidualBlock(attention, lam=start["lam_attention"], gamma=start["gamma_attention"]),
            ResidualBlock(feedforward, lam=start["lam_feedforward"], gamma=start["gamma_feedforward"]),
        )
    std = config.choose_table_std()
    embedding = TextEmbedding(
        std,
        config.vocab_size,
        positions=std,
        most=config.max_position_embeddings,
        types=std if config.type_vocab_size else 0.0,
        norm=norm if config.embedding_norm else None,
    )
    return Network(config.hidden_size, embedding, (made,) * config.num_hidden_layers)


def describe_attention(attention: ShapedSelfAttention) -> AttentionBranch:
    gamma1, gamma2 = (0.0, 0.0) if attention.shaping is None else attention.shaping.start
    weights = {name: Weights(getattr(attention, name).std) for name in ("query", "key", "value", "output")}
    return AttentionBranch(
        attention.heads,
        attention.query.out_features // attention.heads,
        **weights,
        scale=attention.scale,
        mask="causal" if attention.is_causal else None,
        gamma1=gamma1,
        gamma2=gamma2,
    )


def describe_feedforward(feedforward: ShapedFeedForwardBlock) -> FeedForwardBranch:
    pre, post = feedforward.pre, feedforward.post
    activation = feedforward.activation.plain if feedforward.slope is None else feedforward.activation.at(feedforward.width)
    return FeedForwardBranch(pre.out_features, Weights(pre.std), Weights(post.std), activation)
