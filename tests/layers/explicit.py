"""Many networks with explicit weights at once, and the blocks of Transformers in use that are compared with them."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

import shaped
from shaped import AttentionBranch, FeedForwardBranch, Norm, Normalise, ResidualBlock, Weights, rope_frequencies
from shaped.testing.law import draw_tokens
from shaped.testing.stats import generator, random_covariance

M, N = 3, 16
V0 = random_covariance(M, 50)
BIAS = torch.tensor([[0.0, 1.0, -1.0], [0.5, 0.0, float("-inf")], [0.3, -0.2, 0.1]], dtype=torch.float64)

LN, RMS, DYT = Norm("layer", eps=0.5, gain=1.3), Norm("rms", eps=0.5, gain=1.3), Norm("dyt", gain=1.4, alpha=0.8)
PLAIN = Weights(0.3)
UNBIASED: dict[str, Any] = {"query": Weights(0.7), "key": Weights(0.7), "value": PLAIN, "output": PLAIN}
BIASED: dict[str, Any] = {"query": Weights(0.4, 0.8), "key": Weights(0.4, 0.8), "value": Weights(0.3, 0.6), "output": Weights(0.3, 0.5)}


def attention(heads: int = 4, head_width: int = 4, weights: dict[str, Any] = UNBIASED, **options: Any) -> AttentionBranch:
    return AttentionBranch(heads, head_width, **weights, **options)


def feedforward(inner: Weights = PLAIN, outer: Weights = PLAIN, **options: Any) -> FeedForwardBranch:
    return FeedForwardBranch(24, inner, outer, **options)


BLOCKS: dict[str, shaped.Layer] = {
    "attention, biases": ResidualBlock(attention(weights=BIASED), lam=0.6, gamma=0.8),
    "narrow heads": ResidualBlock(attention(6, 2, mask=BIAS), norm=RMS, lam=0.3),
    "grouped, rotary": ResidualBlock(attention(key_heads=2, mask="causal", rope=100.0), norm=RMS, lam=0.3),
    "multi-query, rotary in part, biases": ResidualBlock(
        attention(key_heads=1, weights=BIASED, mask="causal", rope=rope_frequencies(2, 3.0)), norm=LN, lam=0.3
    ),
    "ALiBi, grouped": ResidualBlock(attention(key_heads=2, mask=shaped.alibi(M, 4)), norm=RMS, lam=0.3),
    "window, soft cap": ResidualBlock(attention(mask="causal", window=2, softcap=1.0, scale=1.0), norm=RMS, lam=0.3),
    "QK-norm of a head": ResidualBlock(attention(qk_norm=Norm("rms", eps=0.5, gain=1.5), rope=10.0), norm=RMS, lam=0.3),
    "QK-norm of all heads": ResidualBlock(attention(key_heads=2, qk_norm=LN, qk_norm_over="all", scale=1.0), lam=0.3),
    "shaped": ResidualBlock(attention(key_heads=2, mask=shaped.alibi(M, 4), gamma1=0.9, gamma2=0.7), lam=0.3),
    "SwiGLU, norm and post": ResidualBlock(feedforward(activation="silu", gated=True), norm=RMS, post=RMS, lam=0.5),
    "Post-LN": ResidualBlock(feedforward(Weights(0.3, 0.4), Weights(0.3, 0.5)), after=LN),
    "after and post, RMSNorm": ResidualBlock(feedforward(activation="gelu_tanh"), post=RMS, after=Norm("rms", eps=0.3)),
    "DyT": ResidualBlock(feedforward(activation="tanh", gated=True), norm=DYT, lam=0.5),
    "DyT, post and after": ResidualBlock(feedforward(activation="relu"), post=DYT, after=Norm("dyt", gain=1.2)),
    "parallel": ResidualBlock((attention(weights=BIASED), feedforward(activation="relu2")), norm=(LN, RMS), lam=0.3, gamma=0.7),
    "embedding and end": Normalise(LN) >> ResidualBlock(feedforward(activation=shaped.ShapedReLU().at(N))) >> Normalise(RMS),
}


def draw_explicit(layer: shaped.Layer, n: int, networks: int, number: int, d: int = 1) -> Tensor:
    """The covariances, [network, m, m], after d layers with explicit weights, all networks at once."""
    g = generator(number)
    X = draw_tokens(V0, n, g, (networks,))
    module = layer.module(n, dtype=torch.float64)
    run = vmap(lambda weights, x: functional_call(module, weights, (x,)), chunk_size=2000)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # vmap has no rule for some operations in place
        for _ in range(d):
            shapes = {name: weight.shape for name, weight in module.named_parameters()}
            X = run({name: torch.randn(networks, *shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}, X)
    return X @ X.mT / n
