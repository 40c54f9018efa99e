"""Many networks with explicit weights at once, and the blocks of Transformers in use that are compared with them.

    PYTHONPATH=tests/layers python tests/layers/explicit.py --networks 200000

compares every block's law with that many networks. The tests take fewer.
"""

import argparse
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import shaped
from shaped import AttentionBranch, FeedForwardBranch, Norm, Normalise, ResidualBlock, Weights, rope_frequencies
from shaped.covariance import Point, gram, vech
from shaped.layers.base import Sizes
from shaped.nn.random_blocks import RandomBlock, RandomSelfAttention
from shaped.randomness import Stream
from shaped.testing.law import draw_tokens
from shaped.testing.stats import assert_same_moments, generator, random_covariance, seed

M, N = 3, 16
SIZES = Sizes(N)
V0 = random_covariance(M, 50)
BIAS = torch.tensor([[0.0, 1.0, -1.0], [0.5, 0.0, float("-inf")], [0.3, -0.2, 0.1]], dtype=torch.float64)
ONE_TOKEN = torch.eye(M, dtype=torch.bool)[[0, 0, 1, 1]][:, None].expand(4, M, M)  # heads of a group see the same token
ALIBI = 4.0 * shaped.alibi(M, 4)

LN, RMS, DYT = Norm("layer", eps=1.0, gain=1.5), Norm("rms", eps=1.0, gain=1.5), Norm("dyt", gain=1.4, alpha=0.8)
STRONG = Norm("rms", eps=3.0, gain=1.5)
PLAIN = Weights(0.3)
UNBIASED: dict[str, Any] = {"query": Weights(0.7), "key": Weights(0.7), "value": PLAIN, "output": PLAIN}
WEAK: dict[str, Any] = UNBIASED | {"query": Weights(0.2), "key": Weights(0.2)}
BIASED: dict[str, Any] = {"query": Weights(0.3, 1.2), "key": Weights(0.3, 1.2), "value": Weights(0.3, 1.2), "output": Weights(0.3, 1.4)}


def attention(heads: int = 4, head_width: int = 4, weights: dict[str, Any] = UNBIASED, **options: Any) -> AttentionBranch:
    return AttentionBranch(heads, head_width, **weights, **options)


def feedforward(inner: Weights = PLAIN, outer: Weights = PLAIN, **options: Any) -> FeedForwardBranch:
    return FeedForwardBranch(24, inner, outer, **options)


BLOCKS: dict[str, shaped.Layer] = {
    "attention, biases": ResidualBlock(attention(weights=BIASED), lam=0.6, gamma=0.8),
    "narrow heads": ResidualBlock(attention(6, 2, mask=BIAS), norm=RMS, lam=0.3),
    "grouped, rotary": ResidualBlock(attention(weights=BIASED, key_heads=2, mask="causal", rope=100.0), norm=RMS, lam=0.3),
    "multi-query, rotary in part, biases": ResidualBlock(
        attention(key_heads=1, weights=BIASED, mask="causal", rope=rope_frequencies(2, 3.0)), norm=LN, lam=0.3
    ),
    "ALiBi, grouped": ResidualBlock(attention(key_heads=2, weights=WEAK, mask=ALIBI), norm=RMS, lam=0.3),
    "grouped, a mask for each head": ResidualBlock(attention(key_heads=2, mask=ONE_TOKEN), norm=RMS, lam=0.3),
    "window, soft cap": ResidualBlock(attention(mask="causal", window=2, softcap=1.5, scale=0.08), norm=RMS, lam=0.3),
    "QK-norm of a head": ResidualBlock(attention(qk_norm=Norm("rms", eps=5.0, gain=1.5), rope=10.0), norm=RMS, lam=0.3),
    "QK-norm of all heads": ResidualBlock(attention(key_heads=2, qk_norm=LN, qk_norm_over="all", scale=1.0), lam=0.3),
    "shaped": ResidualBlock(attention(key_heads=2, mask=ALIBI, gamma1=0.9, gamma2=0.7), lam=0.3),
    "shaped, weighed": ResidualBlock(
        attention(weights=UNBIASED | {"output": Weights(0.3, 0.4)}, mask="causal", gamma1=0.9, gamma2=0.7, gamma=0.8), lam=0.3
    ),
    "SwiGLU, norm and post": ResidualBlock(
        feedforward(activation="silu", gated=True), norm=RMS, post=Norm("rms", eps=3.0, gain=1.5), lam=0.5
    ),
    "Post-LN": ResidualBlock(feedforward(Weights(0.3, 0.4), Weights(0.3, 0.5)), after=LN),
    "after and post, RMSNorm": ResidualBlock(feedforward(activation="gelu_tanh"), post=RMS, after=Norm("rms", eps=0.3)),
    "DyT": ResidualBlock(feedforward(activation="tanh", gated=True), norm=DYT),
    "DyT, post and after": ResidualBlock(feedforward(activation="relu"), post=DYT, after=Norm("dyt", gain=1.2)),
    "parallel": ResidualBlock((attention(weights=BIASED), feedforward(activation="relu2")), norm=(LN, RMS), lam=1.2, gamma=0.7),
    "embedding and end": Normalise(LN) >> ResidualBlock(feedforward(activation=shaped.ShapedReLU().at(N))) >> Normalise(RMS),
}


class Watched(nn.Module):
    """A network that also returns the entropy of attention, its mean over heads and queries (0 without attention)."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        entropies = [x.new_zeros(())]
        for block in self.network if isinstance(self.network, nn.Sequential) else [self.network]:
            for branch, norm in zip(block.branches, block.norms, strict=True) if isinstance(block, RandomBlock) else ():
                if isinstance(branch, RandomSelfAttention):
                    logits = torch.stack(branch.logits(norm(x))) + torch.stack([branch.bias(head, x) for head in range(branch.heads)])
                    entropies = [torch.special.entr(torch.softmax(logits, -1)).sum(-1).mean()]
            x = block(x)
        return x, entropies[-1]


def draw_explicit(layer: shaped.Layer, networks: int, number: int, d: int = 1, sizes: Sizes = SIZES, V: Tensor = V0) -> Tensor:
    """d layers of networks with explicit weights, all networks at once: what `join` returns."""
    g = generator(number)
    X, entropy = draw_tokens(V, sizes.n, g, (networks,)), torch.zeros(networks)
    module = Watched(layer.module(sizes.n, sizes.n_k, dtype=torch.float64))
    run = vmap(lambda weights, x: functional_call(module, weights, (x,)), chunk_size=2000)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # vmap has no rule for some operations in place
        for _ in range(d):
            shapes = {name: weight.shape for name, weight in module.named_parameters()}
            weights = {name: torch.randn(networks, *shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}
            X, entropy = run(weights, X)
    return join(gram(X), entropy)


def draw_law(layer: shaped.Layer, path: str, samples: int, number: int, d: int = 1) -> Tensor:
    """The same from the law, without weights."""
    stream, sizes = Stream(seed(number), 0, dtype=torch.float64, device=torch.device("cpu")), Sizes(N)
    seen = {"entropy": torch.zeros(samples)}
    X, point = draw_tokens(V0, N, generator(number), (samples,)), Point(matrix=V0.expand(samples, M, M).contiguous())
    for step in d * layer.layers:
        watch = {"seen": seen} if isinstance(step, ResidualBlock) else {}
        if path == "tokens":
            X = step.advance_tokens(X, sizes, stream, **watch)
        else:
            point = step.advance_gram(point, sizes, stream, **watch)
    return join(gram(X) if path == "tokens" else point.V, seen["entropy"])


def join(V: Tensor, entropy: Tensor) -> Tensor:
    """The upper triangle of V and the entropy of attention, beside each other, [network, p + 1]; without attention V alone."""
    return torch.cat([vech(V), entropy[:, None]], 1) if entropy.any() else vech(V)


def find_distance(one: Tensor, other: Tensor) -> float:
    """The largest Kolmogorov-Smirnov distance between columns."""
    x, y = one.T.sort(-1).values.contiguous(), other.T.sort(-1).values.contiguous()
    at = torch.cat([x, y], -1).contiguous()
    shares = [torch.searchsorted(z, at, right=True) / z.shape[-1] for z in (x, y)]
    return (shares[0] - shares[1]).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=200_000)
    networks = parser.parse_args().networks
    for name, layer in BLOCKS.items():
        explicit = torch.cat([draw_explicit(layer, 10_000, 1000 + part) for part in range(networks // 10_000)])
        for path in ("tokens",) if layer.needs_tokens else ("tokens", "gram"):
            assert_same_moments(draw_law(layer, path, len(explicit), 52), explicit)
        print(f"{name}: {len(explicit)} networks, the same moments")


if __name__ == "__main__":
    main()
