"""A look into a model in training: entropy of the attention, correlation of the tokens, gradients, gains; and where a loss broke."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shaped.hf import attention as interface
from shaped.hf.models import ShapedLayer
from shaped.nn.diagnostics import attention_entropy, token_correlation

GAINS = ("lam_attention", "gamma_attention", "lam_feedforward", "gamma_feedforward")
SHAPING = {"attention.shaping.gamma1": "gamma1", "attention.shaping.gamma2": "gamma2", "feedforward.slope": "slope"}


@torch.no_grad()
def observe(model: nn.Module, ids: Tensor, gradients: dict[str, Tensor]) -> dict[str, list[float]]:
    """Numbers for each layer, as lists: entropy of the softmax in nats, mean correlation of pairs of tokens at the layer's output, norm of
    the gradient of the layer's parameters, and its gains."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, ShapedLayer)}
    correlations: list[float] = []

    def look(module: nn.Module, inputs: Any, x: Tensor) -> None:
        correlations.append(float(token_correlation(x).mean()))

    hooks = [layer.register_forward_hook(look) for layer in layers.values()]
    try:
        with entropies() as found:
            model(input_ids=ids)
    finally:
        for hook in hooks:
            hook.remove()
    norms = [
        sum(float(g.float().square().sum()) for name, g in gradients.items() if name.startswith(layer + ".")) ** 0.5 for layer in layers
    ]
    seen = {"entropy": found, "correlation": correlations, "gradient_norm": norms}
    return seen | {name: values for name, values in _gains(layers.values()).items() if values}


@contextmanager
def entropies() -> Iterator[list[float]]:
    """The mean entropy of the softmax over rows and heads, for each attention that is called meanwhile."""
    found: list[float] = []

    def observer(module: nn.Module, q: Tensor, k: Tensor, scale: float, mask: Tensor | None, causal: bool) -> None:
        found.append(float(attention_entropy(q, k, scale=scale, is_causal=causal, attn_mask=mask).mean()))

    interface.observers.append(observer)
    try:
        yield found
    finally:
        interface.observers.remove(observer)


def _gains(layers: Any) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {name: [] for name in (*GAINS, *SHAPING.values())}
    for layer in layers:
        numbers = dict(layer.block.named_parameters()) | dict(layer.block.named_buffers())
        for path, name in {name: name for name in GAINS}.items() | SHAPING.items():
            if path in numbers:
                values[name].append(float(numbers[path]))
    return values


def first_non_finite(model: nn.Module, loss: Callable[[], Tensor]) -> str:
    """Where a loss breaks: the first parameters, or the first module's output, that are not finite. Computes the loss again, eagerly."""
    broken = [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]
    if broken:
        return f"the parameters {broken[0]} (and {len(broken) - 1} more) after the step before, whose gradient was not finite"
    places: list[str] = []

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not output.isfinite().all():
                places.append(name)

        return hook

    # Inner modules end before the outer ones, so the first that is found is the smallest that made it.
    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            loss()
    finally:
        for hook in hooks:
            hook.remove()
    return f"the output of {places[0]}" if places else "the loss itself, not any layer's output"


def last_non_finite(model: nn.Module, gradients: dict[str, Tensor]) -> str:
    """Where a gradient breaks, or its norm, though the loss is finite: backwards, that of the last parameters is the first."""
    norms = {name: torch.linalg.vector_norm(gradient, dtype=torch.float32) for name, gradient in gradients.items()}
    broken = [name for name, _ in model.named_parameters() if not norms[name].isfinite()]
    if not broken:
        return "another process's rows, or in rounding that does not come again without the compiler"
    return f"that of {broken[-1]} (and {len(broken) - 1} more)"
