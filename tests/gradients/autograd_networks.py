"""Gradients of networks with explicit weights by autograd, and the layers for which the tests compare them with `backpropagate`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from two_samples import find_ks

import shaped
from shaped import AttentionBranch, FeedForwardBranch, Norm, ResidualBlock, Weights
from shaped.covariance import vech
from shaped.gradients.network import name_parameters
from shaped.testing.law import draw_tokens
from shaped.testing.stats import KS_AT_Z, assert_same_moments, seed

OUTPUTS = 5
RMS, LN = Norm("rms", eps=1e-3), Norm("layer")
SMALL, BIASED = Weights(0.2), Weights(0.2, 1.0)


def make_blocks(attention: Weights, feedforward: Weights, norm: Norm, gated: bool, **options: Any) -> shaped.Layer:
    first = AttentionBranch(4, 4, attention, attention, attention, attention, mask="causal", **options)
    second = FeedForwardBranch(24, feedforward, feedforward, activation="silu", gated=gated)
    return ResidualBlock(first, norm=norm) >> ResidualBlock(second, norm=norm)


# Leaky, because a ReLU may switch off all hidden features of a token, and the logarithm of a zero gradient is no number.
LAYERS: dict[str, shaped.Layer] = {
    "shaped": shaped.ShapedAttention(0.6, 0.3) >> shaped.ShapedFeedForward(0.6, 1.0, -1.0),
    "heads, projected, causal": shaped.ShapedAttention(0.6, 0.3, heads=2, project=True, mask="causal"),
    "QK-norm, heads": shaped.ShapedAttention(0.6, 0.3, heads=2, qk_norm=True),
    "RoPE": shaped.ShapedAttention(0.6, 0.3, rope=100.0),
    "unshaped": shaped.ShapedAttention(0.6).unshaped >> shaped.ReLUFeedForward(0.6, 0.1),
    "Pre-LN": shaped.PreLN(shaped.ShapedAttention(1.0, lam=1.0).unshaped) >> shaped.PreLN(shaped.ReLUFeedForward(1.0, 0.1, lam=1.0)),
    "Post-LN": shaped.PostLN(shaped.ShapedAttention(1.0, lam=1.0, heads=2).unshaped),
    "perceptron": shaped.ShapedPerceptron(1.2, -1.2),
    "Llama": make_blocks(SMALL, SMALL, RMS, gated=True, key_heads=2, rope=100.0),
    "GPT-2, biases": make_blocks(BIASED, BIASED, LN, gated=False),
}


def squared_error(outputs: Tensor) -> Tensor:
    return (outputs - 1.0).square().sum((-2, -1)) / 2


def cross_entropy(outputs: Tensor) -> Tensor:
    """Of fixed labels, token by token."""
    m, k = outputs.shape[-2:]
    labels = (torch.arange(m, device=outputs.device) % k).expand(len(outputs), m)
    return nn.functional.cross_entropy(outputs.mT, labels, reduction="none").mean(-1)


Loss = Callable[[Tensor], Tensor]


def differentiate(layer: shaped.Layer, V0: Tensor, n: int, d: int, loss: Loss, networks: int, g: torch.Generator) -> dict[str, Tensor]:
    """What `summarise` returns, by autograd, for networks with explicit weights, all of them at once."""
    return summarise(find_gradients(layer, V0, n, d, loss, networks, g))


def find_gradients(layer: shaped.Layer, V0: Tensor, n: int, d: int, loss: Loss, networks: int, g: torch.Generator) -> shaped.Gradients:
    """What `backpropagate` returns, by autograd through `layer.module(n)`, on the generator's device.

    Every network has weights of its own, which stand in place of the module's.
    """
    how: dict[str, Any] = {"generator": g, "device": g.device, "dtype": torch.float64}
    module = layer.module(n, dtype=torch.float64).to(g.device)
    shapes = {path: weight.shape for path, weight in module.named_parameters()}
    names = name_parameters(list(shapes))
    states = [draw_tokens(V0, n, g, (networks,)).requires_grad_()]
    weights = []
    for _ in range(d):
        drawn = {path: torch.randn(networks, *shape, **how).requires_grad_() for path, shape in shapes.items()}
        weights.append(drawn)
        states.append(functional_call(module, drawn, (states[-1],)))
    losses = loss(states[-1] @ torch.randn(networks, n, OUTPUTS, **how) / n**0.5)
    flat = [drawn[path] for drawn in weights for path in names.values()]
    squares = [gradient.square().sum((-2, -1)).detach() for gradient in torch.autograd.grad(losses.sum(), [*states, *flat])]
    X = states[-1].detach()
    return shaped.Gradients(
        torch.arange(d + 1) / n,
        torch.stack(squares[: d + 1]),
        {name: torch.stack(squares[d + 1 + place :: len(names)]) for place, name in enumerate(names)},
        {},
        losses.detach(),
        X @ X.mT / n,
        torch.full((networks,), torch.inf),
    )


def summarise(gradients: shaped.Gradients) -> dict[str, Tensor]:
    """Logarithms of all squared norms, of the loss, and the last covariance, by name, [network] each.

    Gradients that are zero in exact arithmetic are left out: those of the keys' biases, and with one token those of queries and keys.
    """
    m = gradients.V.shape[-1]
    zero = ("key.bias",) if m > 1 else ("query", "key", "query.bias", "key.bias")
    found = {f"tokens {layer}": row for layer, row in enumerate(gradients.tokens)}
    for name, rows in gradients.weights.items():
        if name not in zero:
            found |= {f"{name} {layer}": row for layer, row in enumerate(rows)}
    found = {name: row.log() for name, row in found.items()} | {"loss": gradients.loss.log()}
    return found | {f"V {i}": row for i, row in enumerate(vech(gradients.V).T)}


def simulate(layer: shaped.Layer, V0: Tensor, n: int, d: int, loss: Loss, networks: int, number: int, **options: Any) -> dict[str, Tensor]:
    """The same from the law."""
    return summarise(shaped.backpropagate(layer, V0, n=n, d=d, outputs=OUTPUTS, loss=loss, samples=networks, seed=seed(number), **options))


def assert_one_law(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """The same joint moments, and marginal distributions that no Kolmogorov-Smirnov test tells apart."""
    assert list(one) == list(other)
    allowed = KS_AT_Z * (1 / len(one["loss"]) + 1 / len(other["loss"])) ** 0.5
    distances = find_distances(one, other)
    worst = max(distances, key=distances.__getitem__)
    assert distances[worst] < allowed, f"{worst}: a Kolmogorov-Smirnov distance of {distances[worst]:.4f}, {allowed:.4f} is allowed"
    assert_same_moments(*(torch.stack(list(rows.values()), -1) for rows in (one, other)))


def find_distances(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Kolmogorov-Smirnov distances, by name."""
    rows = (torch.stack([sample[name] for name in one]) for sample in (one, other))
    return dict(zip(one, find_ks(*rows).value.tolist(), strict=True))
