"""The quantities of a stack over its layers, one number a layer: what verdicts compare, bands surround and pages draw."""

from __future__ import annotations

import math

from shaped.diagnosis.observation import LayerObservation, StackObservation

OF_TOKENS = ("correlation", "rank", "length", "kurtosis")
"""Before the first layer and behind each: one number more than there are layers."""
OF_LAYERS = ("entropy", "entropy_share", "largest_logit", "gradient", "dead")
CURVES = (*OF_TOKENS, *OF_LAYERS)

Curves = dict[str, list[float]]


def list_curves(stack: StackObservation) -> Curves:
    """By name. Entropies are means over all heads, the logit is the largest one, the gradient the norm over all matrices."""
    stages = (stack.entering, *(layer.tokens for layer in stack.layers))
    curves = {name: [float(getattr(tokens, name)) for tokens in stages] for name in OF_TOKENS}
    measures = {
        "entropy": lambda layer: mean_entropy(layer)[0],
        "entropy_share": entropy_share,
        "largest_logit": largest_logit,
        "gradient": layer_gradient,
        "dead": lambda layer: layer.dead,
    }
    return curves | {name: [measure(layer) for layer in stack.layers] for name, measure in measures.items()}


def mean_entropy(layer: LayerObservation) -> tuple[float, float]:
    """The mean over heads of all attention of a layer, and what it would be if attention were uniform."""
    heads = [pair for call in layer.attention.values() for pair in zip(call.entropy, call.uniform_entropy, strict=True)]
    return sum(one for one, _ in heads) / len(heads), sum(other for _, other in heads) / len(heads)


def entropy_share(layer: LayerObservation) -> float:
    """Entropy divided by that of uniform attention, from 0 (one key has everything) to 1; nan where every query has one key."""
    entropy, uniform = mean_entropy(layer)
    return entropy / uniform if uniform > 0 else math.nan


def largest_logit(layer: LayerObservation) -> float:
    values = [value for call in layer.attention.values() for value in call.largest_logit]
    return math.nan if any(map(math.isnan, values)) else max(values)


def layer_gradient(layer: LayerObservation) -> float:
    """Norm of the gradients of all weight matrices together; nan where none is trained."""
    return math.hypot(*layer.gradients.values()) if layer.gradients else math.nan
