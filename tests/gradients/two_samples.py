"""Are two samples of one law? Kolmogorov-Smirnov distances and differences of correlations, of many quantities at once."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Rows = Float[Tensor, "quantity sample"]
SERIES = 101
"""Terms of Kolmogorov's series: enough from 0.2 on, below which the probability is 1."""


class Distances(NamedTuple):
    """Kolmogorov-Smirnov distances, [quantity]."""

    value: Tensor
    error: Tensor
    """Standard error of the difference of the two shares, at the place where it is largest: of a distance that is not zero."""
    p: Tensor
    """The probability of such a distance, or a larger one, between samples of one law."""


def find_ks(one: Rows, other: Rows) -> Distances:
    """Kolmogorov-Smirnov distances between the rows."""
    x, y = one.sort(-1).values, other.sort(-1).values
    at = torch.cat([x, y], -1)
    shares = [torch.searchsorted(z, at, right=True).double() / z.shape[-1] for z in (x, y)]
    value, place = (shares[0] - shares[1]).abs().max(-1)
    there = [share.gather(-1, place[..., None])[..., 0] for share in shares]
    counts = x.shape[-1], y.shape[-1]
    variance = sum(share * (1 - share) / count for share, count in zip(there, counts, strict=True))
    return Distances(value, torch.as_tensor(variance).sqrt(), find_kolmogorov(value * math.sqrt(math.prod(counts) / sum(counts))))


def find_kolmogorov(distance: Tensor) -> Tensor:
    r"""$2\sum_{k \ge 1} (-1)^{k-1} e^{-2k^2x^2}$: how often a distance times $\sqrt{N_1N_2/(N_1+N_2)}$ exceeds x (Smirnov 1939)."""
    k = torch.arange(1, SERIES, dtype=torch.float64, device=distance.device)
    series = 2 * ((-1.0) ** (k - 1) * (-2 * (k * distance.double()[..., None]) ** 2).exp()).sum(-1)
    return torch.where(distance < 0.2, 1.0, series).clamp(0.0, 1.0)


class Correlations(NamedTuple):
    """Correlations of each row with another quantity, [quantity]."""

    value: Tensor
    error: Tensor


def correlate(rows: Rows, other: Float[Tensor, " sample"]) -> Correlations:
    r"""With errors that need no normal law: the spread of $ab - r(a^2 + b^2)/2$, a and b standardised (infinitesimal jackknife)."""
    a, b = ((x - x.mean(-1, keepdim=True)) / x.std(-1, correction=0, keepdim=True) for x in (rows, other))
    value = (a * b).mean(-1)
    influence = a * b - value[..., None] * (a.square() + b.square()) / 2
    return Correlations(value, influence.std(-1) / math.sqrt(rows.shape[-1]))


def find_z(one: Correlations, other: Correlations) -> Tensor:
    """Their differences in standard errors."""
    return (one.value - other.value) / (one.error.square() + other.error.square()).sqrt()


def find_two_sided(z: Tensor) -> Tensor:
    """How often a normal is as far from zero as z."""
    return torch.special.erfc(z.double().abs() / math.sqrt(2))
