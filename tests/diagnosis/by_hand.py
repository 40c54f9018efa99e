"""The quantities of a diagnosis by hand, from materialised logits and streams in double precision, index by index where that is short."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shaped.diagnosis.observation import LayerObservation
from shaped.diagnosis.one_pass.quantities import TokenQuantities


def check_tokens(found: TokenQuantities, x: Tensor, real: Tensor | None = None) -> None:
    """x: [batch, m, n]."""
    sequences = [one.double() if real is None else one[real[i]].double() for i, one in enumerate(x.detach())]
    correlations, ranks = [], []
    for X in sequences:
        m = len(X)
        cosine = torch.nn.functional.cosine_similarity(X[:, None], X[None], dim=-1)
        correlations.append(float(cosine.triu(1).sum()) / (m * (m - 1) / 2))
        shares = torch.linalg.svdvals(X).square() / X.square().sum()
        shares = shares[shares > 1e-14]
        ranks.append(math.exp(-float((shares * shares.log()).sum())))
    together = torch.cat(sequences)
    second = together.square().mean(0)
    expected = {
        "correlation": sum(correlations) / len(correlations),
        "rank": sum(ranks) / len(ranks),
        "length": float(together.square().mean()) ** 0.5,
        "kurtosis": float((second**2).mean() / second.mean() ** 2),
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-5, abs=1e-5), name


def check_attention(found: Any, logits: Tensor, real: Tensor | None = None) -> None:
    """logits: [batch, heads, Q, K], masked with -inf or the dtype's minimum; `real`, [batch, Q]."""
    logits = logits.detach().double()
    logits = logits.masked_fill(logits < -1e30, -torch.inf)
    for head in range(logits.shape[1]):
        rows = [logits[b, head, q] for b in range(len(logits)) for q in range(logits.shape[2]) if real is None or bool(real[b, q])]
        rows = [row[row > -torch.inf] for row in rows]
        entropies = [float(torch.distributions.Categorical(logits=row).entropy()) for row in rows if len(row)]
        assert found.entropy[head] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5, abs=1e-5)
        assert found.uniform_entropy[head] == pytest.approx(sum(math.log(len(row)) for row in rows if len(row)) / len(entropies), rel=1e-5)
        assert found.largest_logit[head] == pytest.approx(max(float(row.max()) for row in rows if len(row)), rel=1e-5, abs=1e-5)


def check_gradients(layers: tuple[LayerObservation, ...], model: nn.Module) -> None:
    """After a backward pass of the same loss."""
    for layer in layers:
        matrices = {name: p for name, p in model.get_submodule(layer.name).named_parameters() if p.ndim >= 2 and p.grad is not None}
        assert layer.gradients.keys() == matrices.keys()
        assert matrices
        for name, parameter in matrices.items():
            assert parameter.grad is not None
            assert layer.gradients[name] == pytest.approx(float(parameter.grad.square().sum()) ** 0.5, rel=1e-5, abs=1e-12)
