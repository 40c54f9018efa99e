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

from shaped.checks import as_tensor, in_range, quote, whole_number
from shaped.nn.functional import rotary_frequencies

Rope = float | tuple[float, ...] | None

MOST_BASE = 1e12
NEGLIGIBLE = 1e-15  # share of the largest eigenvalue below which a mode is left out


def check_rope(rope: Any) -> Rope:
    """None, a base, or the frequencies as numbers that can be compared and hashed."""
    if rope is None:
        return None
    if isinstance(rope, str | bool):
        raise ValueError(f"rope must be a base, such as 10000.0, or an array of frequencies, got {quote(rope)}")
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


def check_rope_width(rope: Rope, width: int, name: str = "n_k", partly: bool = False) -> None:
    """Raises a ValueError if queries of so many features cannot be rotated; `partly`: some of the features may stay as they are."""
    if isinstance(rope, tuple):
        wanted = 2 * len(rope)
        if width < wanted or (width > wanted and not partly):
            least = "at least " if partly else ""
            raise ValueError(f"{name} must be {least}{wanted}, two features for each of rope's {len(rope)} frequencies, got {width}")
    elif rope is not None and width % 2:
        raise ValueError(f"{name} must be even with rope, which rotates pairs of features, got {width}")


def rope_frequencies(width: int, base: float = 10_000.0) -> tuple[float, ...]:
    r"""$\theta_i = \text{base}^{-2i/\text{width}}$, the frequencies that rotate `width` features of a head (`rotary_frequencies`)."""
    width, base = whole_number("width", width, least=2), in_range("base", base, 1.0, MOST_BASE)
    if width % 2:
        raise ValueError(f"width must be even, since features are rotated in pairs, got {width}")
    return tuple(rotary_frequencies(width, base, device=torch.device("cpu")).tolist())


def find_frequencies(rope: float | tuple[float, ...], width: int) -> tuple[float, ...]:
    """Those given, or those of a base, for heads of this width."""
    return rope if isinstance(rope, tuple) else rope_frequencies(width, rope)


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
    with torch.inference_mode(False):  # kept for calls out of it
        return torch.tensor([float(weight @ np.cos(theta * s)) for s in range(lags)], dtype=torch.float64, device="cpu")


def lag_matrix(rope: float | tuple[float, ...], m: int, like: Tensor) -> Float[Tensor, "{m} {m}"]:
    r"""$\kappa(\alpha - \beta)$ for m tokens."""
    place = torch.arange(m, device="cpu")
    return lag_similarity(rope, m)[(place[:, None] - place).abs()].to(like)


@lru_cache(maxsize=32)
def lag_modes(rope: float | tuple[float, ...], m: int) -> Float[Tensor, "modes {m} {m}"]:
    r"""Matrices $c_r^{\alpha\beta} = c_r(\alpha-\beta)$ with $\sum_r c_r(s)\,c_r(t) = \kappa(s - t)$.

    They are the eigenvectors of the Toeplitz matrix of $\kappa$ on the 2m - 1 lags, times the roots of their eigenvalues. There are at most
    2m - 1 of them, and far fewer for many tokens: the eigenvalues fall fast.
    """
    with torch.inference_mode(False), torch.device("cpu"):  # kept for calls out of it
        lags = torch.arange(2 * m - 1)
        values, vectors = torch.linalg.eigh(lag_similarity(rope, 2 * m - 1)[(lags[:, None] - lags).abs()])
        kept = values > NEGLIGIBLE * values[-1]
        place = torch.arange(m)
        return (vectors[:, kept] * values[kept].sqrt()).mT[:, place[:, None] - place + m - 1]
