"""The quantities that are watched while a deep Transformer trains, each one function, and their registry.

To add one: write a function here and put `@quantity(name, unit, source)` above it. It is then measured for every layer by
`shaped pretrain` (metrics.jsonl, TensorBoard) and by `shaped.hf.DiagnosticsCallback` (diagnostics.jsonl, the Trainer's logs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor

from shaped.checks import whole_number
from shaped.nn.attention import check_arguments, check_tensors, index_queries
from shaped.nn.attention_hooks import AttentionInputs


class Source(Enum):
    """What a quantity of a layer is computed from, and thus the arguments of its function."""

    ATTENTION = auto()
    """(inputs: AttentionInputs, real: Tensor | None). `real`, [batch, m], is False at padding; None: there is no padding."""
    TOKENS = auto()
    """(x: Tensor, real: Tensor | None): the layer's output, [batch, m, n]."""
    GRADIENTS = auto()
    """(gradients: Iterable[Tensor]) of the layer's parameters."""
    GAINS = auto()
    """(gains: Mapping[str, Tensor | float]) by name; the function returns None where the layer lacks the gain."""


@dataclass(frozen=True)
class Quantity:
    name: str
    unit: str
    """For the axis of a picture; empty for a pure number."""
    source: Source
    function: Callable[..., Tensor | float | None]

    @property
    def label(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name


QUANTITIES: dict[str, Quantity] = {}
"""The registry, by name, in the order of the lines in metrics.jsonl."""

Measure = Callable[..., Tensor | float | None]


def quantity(name: str, unit: str, source: Source) -> Callable[[Measure], Measure]:
    """Registers the function below it."""

    def register(function: Measure) -> Measure:
        if name in QUANTITIES:
            raise ValueError(f"name must be new among the quantities, got {name!r}, which is there already")
        QUANTITIES[name] = Quantity(name, unit, source, function)
        return function

    return register


@torch.no_grad()
def measure(source: Source, *arguments: object) -> dict[str, float]:
    """All quantities of one layer that are computed from this source, by name; without those that the layer lacks."""
    values = {known.name: known.function(*arguments) for known in QUANTITIES.values() if known.source is source}
    return {name: float(value) for name, value in values.items() if value is not None}


@quantity("entropy", "nats", Source.ATTENTION)
def mean_entropy(inputs: AttentionInputs, real: Tensor | None = None) -> Tensor:
    """Mean of `attention_entropy` over heads and queries. Queries at padding are left out."""
    entropies = attention_entropy(inputs.q, inputs.k, scale=inputs.scale, is_causal=inputs.is_causal, attn_mask=inputs.mask)
    return entropies.mean() if real is None else entropies.mean(-2)[real].mean()


@quantity("correlation", "", Source.TOKENS)
def mean_correlation(x: Tensor, real: Tensor | None = None) -> Tensor:
    """Mean of `token_correlation` over the sequences that have a pair of tokens."""
    return token_correlation(x, real).nanmean()


@quantity("gradient_norm", "", Source.GRADIENTS)
def gradient_norm(gradients: Iterable[Tensor]) -> float:
    """Euclidean norm of all gradients together."""
    return math.hypot(*(measure_length(gradient) for gradient in gradients))


def measure_length(x: Tensor) -> float:
    """Euclidean norm, in units of the largest entry: the squares of gradients that vanish leave the range of floats."""
    x = at_least_single(x)
    largest = float(x.abs().amax()) if x.numel() else 0.0
    return largest * float((x / largest).square().sum().sqrt()) if 0.0 < largest < math.inf else largest


GAINS = ("lam_attention", "gamma_attention", "lam_feedforward", "gamma_feedforward", "gamma1", "gamma2", "slope")
"""Of the two residual branches (Eq. shaped_transformer), of the shaped attention, and the negative slope of the shaped ReLU."""


def read_gain(gains: Mapping[str, Tensor | float], name: str) -> Tensor | float | None:
    return gains.get(name)


for _name in GAINS:
    quantity(_name, "", Source.GAINS)(partial(read_gain, name=_name))


def attention_entropy(
    q: Tensor, k: Tensor, *, scale: float | None = None, is_causal: bool = False, attn_mask: Tensor | None = None, block: int = 128
) -> Tensor:
    r"""Entropy of each query's softmax, in nats, [..., heads, Q]: $H = \log\sum_j e^{s_j} - \sum_j p_j s_j$.

    It is log m where attention to m tokens is uniform, and 0 where a query may attend to nothing. Arguments are those of
    `shaped_attention`; the queries are the last Q of the K tokens. Logits are computed for `block` queries at a time, in single precision
    at least, also under autocast.
    """
    check_tensors(q=q, k=k)
    check_tensors(optional=True, attn_mask=attn_mask)
    whole_number("block", block)
    with torch.autocast(q.device.type, enabled=False):
        q, k = at_least_single(q), at_least_single(k)
        mask = at_least_single(attn_mask) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        check_arguments(q, k, k, mask, scale=scale)
        blocks = iterate_logits(q, k, scale=scale, is_causal=is_causal, attn_mask=mask, block=block)
        return torch.cat([softmax_entropy(s) for _, s in blocks], -1)


def at_least_single(x: Tensor) -> Tensor:
    """Single precision, or double where it is double already."""
    return x.double() if x.dtype == torch.float64 else x.float()


def softmax_entropy(s: Tensor) -> Tensor:
    r"""$-\sum_j p_j \log p_j$ with p = softmax(s), over the last dimension. Logits of -inf count nothing."""
    log_p = torch.log_softmax(s, -1)
    return -torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0.0).sum(-1)


def iterate_logits(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    block: int = 128,
    positions: Tensor | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """q kᵀ · scale + mask for `block` queries at a time, with -inf where attention is forbidden: (which queries, [..., heads, block, K]).

    `positions`, [Q] or [batch, Q]: each query's index among the keys, for the causal mask; by default the queries are the last Q of the
    K tokens.
    """
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    Q, K = q.shape[-2], k.shape[-2]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    places = index_queries(q, K, positions)
    for start in range(0, Q, block):
        rows = slice(start, min(start + block, Q))
        s = q[..., rows, :] @ k.mT * factor
        if attn_mask is not None:
            mask = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., rows, :]
            s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
        if is_causal:
            s = s.masked_fill(torch.arange(K, device=q.device) > places[..., rows, :], -torch.inf)
        yield rows, s


def token_correlation(x: Tensor, real: Tensor | None = None) -> Tensor:
    r"""Mean over pairs of tokens of $\rho^{ab} = \langle x^a, x^b\rangle / |x^a||x^b|$, one number a sequence: [..., m, n] to [...].

    `real`, [..., m], is False or 0 at padding. A sequence of fewer than two tokens has no pair: its number is nan.
    """
    check_tensors(x=x)
    check_tensors(optional=True, real=real)
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(f"x must be floats [..., tokens, features], got {x.dtype}, {list(x.shape)}")
    real = torch.ones(x.shape[:-1], device=x.device) if real is None else real
    if real.shape != x.shape[:-1]:
        raise ValueError(f"real must be [..., tokens] = {list(x.shape[:-1])}, got shape {list(real.shape)}")
    x, real = at_least_single(x), real != 0
    # First in units of the largest entry: the squares of a stream that vanishes or explodes leave the range of floats.
    x = x / x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    directions = torch.nn.functional.normalize(x, dim=-1) * real[..., None]
    m = real.to(x.dtype).sum(-1)
    own = directions.square().sum((-1, -2))
    return (directions.sum(-2).square().sum(-1) - own) / (m * (m - 1))
