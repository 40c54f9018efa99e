"""What is measured of a layer: formulas, each one function, and the numbers that they return."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from shaped.covariance import effective_rank
from shaped.nn.attention import MASKED
from shaped.nn.diagnostics import at_least_single, softmax_entropy, token_correlation

NORMALISED = 0.01
"""By how much a length may differ from that of a normalised query or key: its rounding in bfloat16 is smaller. Lengths that nothing
normalises differ by about (2D)^(-1/2) among tokens, 0.06 for heads of 128 features, and have no reason to be 1 or the root of D."""
NO_DERIVATIVE = 1e-6
"""A derivative of an activation that is not larger than this lets no gradient pass. GELU's is smaller beyond -5.4, SiLU's beyond -17."""
ROWS = 4096  # tokens whose derivatives are computed at a time


@dataclass(frozen=True)
class TokenQuantities:
    """Of the residual stream at one place. Padding is left out."""

    correlation: float
    """Mean over pairs of tokens of a sequence, then over sequences."""
    rank: float
    """Effective rank of the tokens of a sequence, mean over sequences: from 1 to `tokens`."""
    length: float
    """Root mean square of the entries."""
    kurtosis: float
    tokens: int
    """Tokens of the longest sequence."""


NO_TOKENS = TokenQuantities(math.nan, math.nan, math.nan, math.nan, 0)
"""Where the residual stream was not seen."""


@dataclass(frozen=True)
class AttentionQuantities:
    """Of one call of attention, one number a head. Queries at padding, and those that may attend to nothing, are left out."""

    entropy: tuple[float, ...]
    """Of the softmax, in nats: mean over queries."""
    uniform_entropy: tuple[float, ...]
    """What it would be if attention were uniform: the mean logarithm of the number of keys."""
    largest_logit: tuple[float, ...]
    """The largest input of the softmax, scale and bias included."""
    largest_share: float = 1.0
    """What one key can get of the attention of a query that sees the most keys, whatever the directions of queries and keys are."""


@dataclass(frozen=True)
class DeadUnits:
    """Of one call of an activation function. A unit is one feature, the last dimension."""

    dead: int
    units: int


@torch.no_grad()
def measure_tokens(x: Tensor, real: Tensor | None = None) -> TokenQuantities:
    """Of tokens [batch, m, n]; `real`, [batch, m], is False at padding. Computed in double precision, a sequence at a time."""
    correlations, ranks, squares, counts = [], [], [], []
    for number, sequence in enumerate(x.detach()):
        X = to_double(sequence if real is None else sequence[real[number]])
        if not len(X):
            continue
        if not X.isfinite().all():
            return TokenQuantities(math.nan, math.nan, math.nan, math.nan, x.shape[1])
        correlations.append(float(token_correlation(X)))
        # The smaller of XXᵀ and XᵀX: they have the same eigenvalues except zeros.
        ranks.append(float(effective_rank(X @ X.mT if len(X) <= X.shape[1] else X.mT @ X)) if X.any() else math.nan)
        squares.append(X.square().sum(0))
        counts.append(len(X))
    if not counts:
        return NO_TOKENS
    features = torch.stack(squares).sum(0) / sum(counts)
    return TokenQuantities(
        mean_of_numbers(correlations), mean_of_numbers(ranks), float(features.mean().sqrt()), feature_kurtosis(features), max(counts)
    )


def feature_kurtosis(squares: Tensor) -> float:
    r"""$\overline{s_j^4}\,/\,(\overline{s_j^2})^2$ with $s_j^2$ the mean square of feature j over tokens (He et al. 2024, "Understanding
    and Minimising Outlier Features", Eq. 1): 1 where all features are equally large, n where one has everything."""
    return float(squares.square().mean() / squares.mean().square())


@torch.no_grad()
def measure_attention(logits: Iterable[tuple[slice, Tensor]], real: Tensor | None = None, bound: float = math.inf) -> AttentionQuantities:
    """Of the softmax's inputs, [batch, heads, queries, K], which come some queries at a time; `real`, [batch, Q], is False at padding.

    `bound` is what the logits cannot pass (`bound_logits`).
    """
    entropy = uniform = largest = queries = torch.zeros((), device="cpu")
    keys = 1
    for rows, block in logits:
        s = at_least_single(block)
        allowed = ~(s <= MASKED)  # nan is not masked
        s = s.masked_fill(~allowed, -torch.inf)
        count = allowed.sum(-1)
        kept = count > 0
        if real is not None:
            kept = kept & real[:, None, rows]
        keys = max(keys, int(torch.where(kept, count, 0).amax()))
        top = s.amax(-1)
        highest = torch.where(kept, top, -torch.inf).amax((0, 2)).cpu()
        largest = highest if largest.ndim == 0 else torch.maximum(largest, highest)
        entropies = torch.where(top.isfinite(), softmax_entropy(s), torch.nan)
        entropy = entropy + torch.where(kept, entropies, 0.0).sum((0, 2), dtype=torch.float64).cpu()
        uniform = uniform + torch.where(kept, count.clamp(min=1).double().log(), 0.0).sum((0, 2)).cpu()
        queries = queries + kept.sum((0, 2)).cpu()
    return AttentionQuantities(
        tuple((entropy / queries).tolist()),
        tuple((uniform / queries).tolist()),
        tuple(torch.where(queries > 0, largest.double(), torch.nan).tolist()),
        bound_share(bound, keys),
    )


@torch.no_grad()
def bound_logits(q: Tensor, k: Tensor, scale: float | None) -> float:
    r"""What the logits of normalised queries and keys, [batch, heads, tokens, D], cannot pass: scale · |q| · |k|; else infinity.

    Normalised are those whose root mean square is 1 (RMSNorm, LayerNorm) or whose length is 1. Tokens of length 0 are left out.
    """
    D, lengths = q.shape[-1], []
    for x in (q, k):
        norms = torch.linalg.vector_norm(at_least_single(x), dim=-1).flatten()
        norms = norms[norms > 0.0]
        fixed = [size for size in (D**0.5, 1.0) if len(norms) and bool(((norms / size - 1.0).abs() <= NORMALISED).all())]
        lengths.append(fixed[0] if fixed else math.inf)
    return math.inf if math.inf in lengths else abs(D**-0.5 if scale is None else scale) * lengths[0] * lengths[1]


def bound_share(logit: float, keys: int) -> float:
    """What one key gets if its logit is this one and those of all others are its negative: 1/(1 + (keys - 1) e^(-2 logit))."""
    return 1.0 / (1.0 + (keys - 1) * math.exp(-2.0 * logit))


def count_dead_units(function: Callable[[Tensor], Tensor], x: Tensor) -> DeadUnits:
    """How many features of x, [..., units], are dead: the function's derivative there is at most NO_DERIVATIVE for every token.

    `function` acts on each entry alone, so the gradient of its sum is its derivative. Without a token no unit counts: an expert that the
    router sends none is not known to be dead.
    """
    x = at_least_single(x.detach()).flatten(0, -2)
    if not len(x):
        return DeadUnits(0, 0)
    alive = torch.zeros(x.shape[-1], dtype=torch.bool, device=x.device)
    for rows in x.split(ROWS):
        # Hooks of its own: those of gradient checkpointing would count these tensors among the model's.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, keep):
            entries = rows.clone().requires_grad_()
            (derivative,) = torch.autograd.grad(function(entries.view_as(entries).clone()).sum(), entries)
        alive |= ~(derivative.abs() <= NO_DERIVATIVE).all(0)
    return DeadUnits(int((~alive).sum()), x.shape[-1])


def keep(x: Tensor) -> Tensor:
    return x


def mean_of_numbers(values: list[float]) -> float:
    """Without those that are nan, as those of a sequence of one token, which has no pair."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def to_double(x: Tensor) -> Tensor:
    """Some devices have no double precision; there it is computed on the CPU."""
    return (x.cpu() if x.device.type == "mps" else x).double()
