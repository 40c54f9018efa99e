"""Encoders: BERT, RoBERTa, ModernBERT, ViT. Each function follows the family's source in transformers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from shaped.checks import positive, whole_number
from shaped.hf.prediction.embeddings import PatchEmbedding, TextEmbedding
from shaped.hf.prediction.heads import Dense, Head
from shaped.hf.prediction.parts import (
    Block,
    Network,
    Sizes,
    check_causal,
    gated_feedforward,
    make_head,
    make_projections,
    read_activation,
    read_optional,
    read_padding,
    read_positive,
    read_rope,
    read_whole,
    read_window,
    refuse,
    scale_depth,
)
from shaped.layers import AttentionBranch, FeedForwardBranch, Norm, ResidualBlock, Weights


def describe_bert(config: PreTrainedConfig, m: int) -> Network:
    """Post-LN, also on the sum of token, position and type."""
    return describe_postln(config, taken=0, head_activation=read_activation(config, "hidden_act"))


def describe_roberta(config: PreTrainedConfig, m: int) -> Network:
    """BERT whose positions count from the padding id on."""
    return describe_postln(config, taken=read_whole(config, "pad_token_id", least=0) + 1, head_activation="gelu")


def describe_postln(config: PreTrainedConfig, taken: int, head_activation: str) -> Network:
    """`taken`: positions that no token has."""
    refuse(config, "add_cross_attention")
    sizes = Sizes.read(config)
    weights, norm = Weights(sizes.std), Norm("layer", eps=read_positive(config, "layer_norm_eps"))
    mask = "causal" if getattr(config, "is_decoder", False) else None
    if mask is not None:
        check_causal(config)
    attention = AttentionBranch(sizes.heads, sizes.head_width, **make_projections(sizes.std), mask=mask)
    feedforward = FeedForwardBranch(read_whole(config, "intermediate_size"), weights, weights, read_activation(config, "hidden_act"))
    embedding = TextEmbedding(
        sizes.std,
        read_whole(config, "vocab_size"),
        padding=read_padding(config),
        positions=sizes.std,
        most=read_whole(config, "max_position_embeddings") - taken,
        types=sizes.std,
        norm=norm,
        keeps_padding=taken > 0,
    )
    block = ResidualBlock(attention, after=norm), ResidualBlock(feedforward, after=norm)
    head = make_head(config, sizes.std, None, dense=Dense(sizes.std, head_activation, norm))
    return Network(sizes.n, embedding, (block,) * sizes.depth, head)


def describe_modernbert(config: PreTrainedConfig, m: int) -> Network:
    """Pre-LN without a norm before the first attention; gated; local and global layers with a RoPE each; truncated normal weights.

    The products are drawn as if the weights were normal with the truncated ones' standard deviation: an error of O(1/n).
    """
    sizes = Sizes.read(config)
    std = sizes.std * truncated_std(getattr(config, "initializer_cutoff_factor", None))
    out = scale_depth(std, sizes.depth)
    norm = Norm("layer", eps=read_positive(config, "norm_eps"))
    hidden = read_whole(config, "intermediate_size")
    feedforward = ResidualBlock(gated_feedforward(hidden, read_activation(config, "hidden_activation"), std, out), norm=norm)

    @cache
    def block(window: int | None, first: bool) -> Block:
        rope, factor = read_rope(config, sizes.head_width, "full_attention" if window is None else "sliding_attention")
        attention = AttentionBranch(
            sizes.heads,
            sizes.head_width,
            **make_projections(std, out),
            scale=factor * sizes.head_width**-0.5,
            mask=None if window is None else local_mask(m, window),
            rope=rope,
        )
        return ResidualBlock(attention, norm=None if first else norm), feedforward

    # transformers draws the row of padding like the others: `init_weight` comes after the row was set to 0.
    embedding = TextEmbedding(std, read_whole(config, "vocab_size"), norm=norm)
    head = make_head(config, std, norm, dense=Dense(out, read_activation(config, "classifier_activation"), norm))
    head = head if head.tied else replace(head, std=out)
    return Network(sizes.n, embedding, tuple(block(read_window(config, layer), layer == 0) for layer in range(sizes.depth)), head)


def truncated_std(cutoff: float | None) -> float:
    r"""The standard deviation of a standard normal truncated at ±c: $\sqrt{1 - 2c\varphi(c)/(2\Phi(c) - 1)}$."""
    c = min(40.0, positive("initializer_cutoff_factor", 3.0 if cutoff is None else cutoff))  # beyond it nothing is cut
    if c < 1e-3:  # uniform; the difference below would be of rounding errors
        return c / math.sqrt(3.0)
    density = math.exp(-(c**2) / 2) / math.sqrt(2 * math.pi)
    return math.sqrt(1.0 - 2.0 * c * density / math.erf(c / math.sqrt(2.0)))


def local_mask(m: int, window: int) -> Tensor:
    """A token sees those at a distance of at most `window`, before it and after it."""
    place = torch.arange(m)
    return torch.zeros(m, m, dtype=torch.float64).masked_fill((place[:, None] - place).abs() > window, -torch.inf)


def describe_vit(config: PreTrainedConfig, m: int) -> Network:
    """Pre-LN on the class token and the patches of an image of white noise."""
    sizes = Sizes.read(config)
    weights, norm = Weights(sizes.std), Norm("layer", eps=read_positive(config, "layer_norm_eps"))
    head_width = read_optional(read_whole, config, "head_dim") or sizes.head_width
    attention = AttentionBranch(sizes.heads, head_width, **make_projections(sizes.std))
    feedforward = FeedForwardBranch(read_whole(config, "intermediate_size"), weights, weights, read_activation(config, "hidden_act"))
    block = ResidualBlock(attention, norm=norm), ResidualBlock(feedforward, norm=norm)
    image, patch = read_pair(config, "image_size"), read_pair(config, "patch_size")
    patches = (image[0] // patch[0]) * (image[1] // patch[1])
    if patches < 1:
        raise ValueError(f"patch_size must be at most image_size, {list(image)}, got {list(patch)}")
    pixels = read_whole(config, "num_channels") * patch[0] * patch[1]
    head = Head(whole_number("num_labels", config.num_labels), sizes.std, norm, is_classifier=True)
    # transformers truncates the tables at ±2, and not at two standard deviations: it is seen where these are near 1.
    embedding = PatchEmbedding(sizes.std, sizes.std * truncated_std(2.0 / sizes.std), patches, pixels)
    return Network(sizes.n, embedding, (block,) * sizes.depth, head)


def read_pair(config: PreTrainedConfig, name: str) -> tuple[int, int]:
    """A size in pixels: of a square, or height and width."""
    given = getattr(config, name, None)
    both = (given, given) if not isinstance(given, list | tuple) else given
    if len(both) != 2:
        raise ValueError(f"{name} must be a number or two, got {given!r}")
    return whole_number(name, both[0]), whole_number(name, both[1])
