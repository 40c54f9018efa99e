"""Decoders: GPT-2, GPT-NeoX, and Llama with its relatives. Each function follows the family's source in transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import PreTrainedConfig

from shaped.hf.prediction.embeddings import TextEmbedding
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


def describe_gpt2(config: PreTrainedConfig, m: int) -> Network:
    """Pre-LN. The last matrix of each branch starts smaller by sqrt(2 · depth)."""
    refuse(config, "add_cross_attention")
    check_causal(config)
    sizes = Sizes.read(config)
    n, std, out = sizes.n, sizes.std, scale_depth(sizes.std, sizes.depth)
    norm = Norm("layer", eps=read_positive(config, "layer_norm_epsilon"))
    hidden = read_optional(read_whole, config, "n_inner") or 4 * n
    feedforward = FeedForwardBranch(hidden, Weights(std), Weights(out), read_activation(config, "activation_function"))

    def block(layer: int) -> Block:
        scale = sizes.head_width**-0.5 if getattr(config, "scale_attn_weights", True) else 1.0
        if getattr(config, "scale_attn_by_inverse_layer_idx", False):
            scale /= layer + 1
        attention = AttentionBranch(sizes.heads, sizes.head_width, **make_projections(std, out), scale=scale, mask="causal")
        return ResidualBlock(attention, norm=norm), ResidualBlock(feedforward, norm=norm)

    most = read_whole(config, "max_position_embeddings")
    embedding = TextEmbedding(std, read_whole(config, "vocab_size"), positions=std, most=most)
    return Network(n, embedding, tuple(map(block, range(sizes.depth))), make_head(config, std, norm))


def describe_gpt_neox(config: PreTrainedConfig, m: int) -> Network:
    """GPT-NeoX and Pythia: LayerNorms of one input, then attention and feed-forward side by side; a part of the features is rotated."""
    check_causal(config)
    sizes = Sizes.read(config)
    weights, norm = Weights(sizes.std), Norm("layer", eps=read_positive(config, "layer_norm_eps"))
    rope, factor = read_rope(config, sizes.head_width)
    scale = factor * sizes.head_width**-0.5
    attention = AttentionBranch(sizes.heads, sizes.head_width, **make_projections(sizes.std), scale=scale, mask="causal", rope=rope)
    hidden = read_whole(config, "intermediate_size")
    feedforward = FeedForwardBranch(hidden, weights, weights, read_activation(config, "hidden_act"))
    if getattr(config, "use_parallel_residual", True):
        block: Block = (ResidualBlock((attention, feedforward), norm=norm),)
    else:
        block = ResidualBlock(attention, norm=norm), ResidualBlock(feedforward, norm=norm)
    embedding = TextEmbedding(sizes.std, read_whole(config, "vocab_size"))
    return Network(sizes.n, embedding, (block,) * sizes.depth, make_head(config, sizes.std, norm))


def describe_llama(config: PreTrainedConfig, m: int) -> Network:
    """RMSNorm before each branch, RoPE, grouped heads, SwiGLU."""
    return describe_rms_decoder(config)


def describe_mistral(config: PreTrainedConfig, m: int) -> Network:
    """Llama with a sliding window in every layer."""
    return describe_rms_decoder(config, window=read_optional(read_whole, config, "sliding_window"))


def describe_qwen2(config: PreTrainedConfig, m: int) -> Network:
    """Llama with biases, which start at 0, and windows by layer."""
    return describe_rms_decoder(config, window="by layer")


def describe_qwen3(config: PreTrainedConfig, m: int) -> Network:
    """Llama with QK-norm over each head, and windows by layer."""
    return describe_rms_decoder(config, window="by layer", qk_norm_over="head")


def describe_olmo2(config: PreTrainedConfig, m: int) -> Network:
    """QK-norm over all heads at once; norms of the branches' outputs, none of their inputs."""
    return describe_rms_decoder(config, qk_norm_over="all", pre=False, post=True)


def describe_gemma2(config: PreTrainedConfig, m: int) -> Network:
    """Norms before and after each branch, soft caps, windows by layer, embeddings times sqrt(n). Norms multiply by 1 + w; w starts at 0."""
    refuse(config, "use_bidirectional_attention")
    cap = read_optional(read_positive, config, "attn_logit_softcapping")
    if config._attn_implementation == "sdpa":  # transformers' fused attention leaves the soft cap out
        cap = None
    return describe_rms_decoder(
        config,
        window="by layer",
        post=True,
        scale=read_positive(config, "query_pre_attn_scalar") ** -0.5,
        softcap=cap,
        last_softcap=read_optional(read_positive, config, "final_logit_softcapping"),
        activation="hidden_activation",
        embedding_scale=read_whole(config, "hidden_size") ** 0.5,
    )


def describe_rms_decoder(
    config: PreTrainedConfig,
    *,
    window: int | str | None = None,
    qk_norm_over: str | None = None,
    pre: bool = True,
    post: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    last_softcap: float | None = None,
    activation: str = "hidden_act",
    embedding_scale: float = 1.0,
) -> Network:
    """A decoder with RMSNorm, RoPE, grouped heads and a gated feed-forward layer. Biases start at 0."""
    check_causal(config)
    sizes = Sizes.read(config)
    std = sizes.std
    head_width = read_optional(read_whole, config, "head_dim") or sizes.head_width
    key_heads = read_optional(read_whole, config, "num_key_value_heads") or sizes.heads
    if sizes.heads % key_heads:
        raise ValueError(f"num_key_value_heads must divide num_attention_heads, {sizes.heads}, got {key_heads}")
    norm = Norm("rms", eps=read_positive(config, "rms_norm_eps"))
    rope, factor = read_rope(config, head_width)
    how = make_projections(std)
    how |= {"key_heads": key_heads, "scale": factor * (head_width**-0.5 if scale is None else scale), "softcap": softcap, "rope": rope}
    if qk_norm_over is not None:
        how |= {"qk_norm": norm, "qk_norm_over": qk_norm_over}
    places: dict[str, Any] = {"norm": norm if pre else None, "post": norm if post else None}
    feedforward = gated_feedforward(read_whole(config, "intermediate_size"), read_activation(config, activation), std)

    @cache
    def block(window: int | None) -> Block:
        attention = AttentionBranch(sizes.heads, head_width, mask="causal", window=window, **how)
        return ResidualBlock(attention, **places), ResidualBlock(feedforward, **places)

    windows = [read_window(config, layer) if window == "by layer" else window for layer in range(sizes.depth)]
    embedding = TextEmbedding(embedding_scale * std, read_whole(config, "vocab_size"), padding=read_padding(config))
    return Network(sizes.n, embedding, tuple(block(one) for one in windows), make_head(config, std, norm, softcap=last_softcap))
