"""Rotary positions (RoPE, Su et al. 2021): the frequencies, and the similarity of positions that random queries and keys see.

A rope is a base, or the frequencies themselves, in radians a token, one for each pair of features of a query.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from shaped.checks import as_tensor, in_range

Rope = float | tuple[float, ...] | None

MOST_BASE = 1e12
NEGLIGIBLE = 1e-15  # share of the largest eigenvalue below which a mode is left out


def check_rope(rope: Any) -> Rope:
    """None, a base, or the frequencies as numbers that can be compared and hashed."""
    if rope is None:
        return None
    if isinstance(rope, str | bool):
        raise ValueError(f"rope must be a base, such as 10000.0, or an array of frequencies, got {rope!r}")
    given = as_tensor("rope", rope)
    if given.ndim == 0:
        return in_range("rope", given.item(), 1.0, MOST_BASE)
    if given.ndim != 1 or not given.numel() or given.dtype == torch.bool or given.is_complex():
        raise ValueError(f"rope must be a base or a list of frequencies, got shape {tuple(given.shape)} of {given.dtype}")
    frequencies = given.detach().to("cpu", torch.float64)
    if not (frequencies.abs() <= MOST_BASE).all():
        worst = frequencies[~(frequencies.abs() <= MOST_BASE)][0].item()
        raise ValueError(f"rope must hold finite frequencies of at most {MOST_BASE:g}, got {worst}")
    return tuple(frequencies.tolist())


def describe_rope(rope: Rope) -> str:
    return f"<{len(rope)} frequencies>" if isinstance(rope, tuple) else repr(rope)


def check_rope_width(rope: Rope, n_k: int) -> None:
    """Raises a ValueError if queries of n_k features cannot be rotated."""
    if isinstance(rope, tuple) and n_k != 2 * len(rope):
        raise ValueError(f"n_k must be {2 * len(rope)}, two features for each of rope's {len(rope)} frequencies, got {n_k}")
    if rope is not None and n_k % 2:
        raise ValueError(f"n_k must be even with rope, which rotates pairs of features, got {n_k}")


def rope_frequencies(rope: float | tuple[float, ...], n_k: int) -> Float[Tensor, " {n_k}//2"]:
    r"""The frequencies $\theta_i = \text{base}^{-2i/n_k}$ of $n_k/2$ pairs of features, or those given."""
    if isinstance(rope, tuple):
        return torch.tensor(rope, dtype=torch.float64)
    return rope ** (-torch.arange(0, n_k, 2, dtype=torch.float64) / n_k)


@lru_cache(maxsize=32)
def lag_similarity(rope: float | tuple[float, ...], lags: int) -> Float[Tensor, " {lags}"]:
    r"""$\kappa(s)$ for s = 0, …, lags - 1: the mean of $\cos(\theta s)$ over the frequencies.

    A base has infinitely many frequencies in the limit of wide keys: $\kappa(s) = \int_0^1 \cos(s\,\text{base}^{-u})\,du$. The integral
    is a sum of Gauss-Legendre rules of 16 nodes, each over at most 4 radians of the phase.
    """
    if isinstance(rope, tuple):
        theta = np.array(rope)
        weight = np.full(len(theta), 1.0 / len(theta))
    else:
        panels = 4 + math.ceil(lags * math.log(rope) / 4.0)
        nodes, weights = np.polynomial.legendre.leggauss(16)
        theta = rope ** (-((np.arange(panels)[:, None] + (nodes + 1.0) / 2.0) / panels).ravel())
        weight = np.tile(weights / (2.0 * panels), panels)
    return torch.tensor([float(weight @ np.cos(theta * s)) for s in range(lags)], dtype=torch.float64)


def lag_matrix(rope: float | tuple[float, ...], m: int, like: Tensor) -> Float[Tensor, "{m} {m}"]:
    r"""$\kappa(\alpha - \beta)$ for m tokens."""
    place = torch.arange(m)
    return lag_similarity(rope, m)[(place[:, None] - place).abs()].to(like)


@lru_cache(maxsize=32)
def lag_modes(rope: float | tuple[float, ...], m: int) -> Float[Tensor, "modes {m} {m}"]:
    r"""Matrices $c_r^{\alpha\beta} = c_r(\alpha-\beta)$ with $\sum_r c_r(s)\,c_r(t) = \kappa(s - t)$.

    They are the eigenvectors of the Toeplitz matrix of $\kappa$ on the 2m - 1 lags, times the roots of their eigenvalues. There are at most
    2m - 1 of them, and far fewer for many tokens: the eigenvalues fall fast.
    """
    lags = torch.arange(2 * m - 1)
    values, vectors = torch.linalg.eigh(lag_similarity(rope, 2 * m - 1)[(lags[:, None] - lags).abs()])
    kept = values > NEGLIGIBLE * values[-1]
    place = torch.arange(m)
    return (vectors[:, kept] * values[kept].sqrt()).mT[:, place[:, None] - place + m - 1]
