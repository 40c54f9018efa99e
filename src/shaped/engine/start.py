"""The covariance V0 that paths start from, and tokens that have it."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from shaped.checks import as_tensor
from shaped.covariance import check_covariance, eigen_factor, factor, narrow_factor, scale_to_unit, symmetrise
from shaped.randomness import Stream

NEGLIGIBLE = 1e-6
"""Eigenvalues below this share of their sum are rounding, also of float32 tokens whose covariance is converted to float64."""


def count_tokens(V0: Any) -> int:
    """m of a V0 that is not checked yet; 0 of a single number, which `prepare_start` refuses."""
    return (as_tensor("V0", V0).shape or (0,))[-1]


def prepare_start(V0: Any, samples: int | None, dtype: torch.dtype) -> Float[Tensor, "sample m m"]:
    """V0 for every sample, symmetric, and positive semi-definite up to rounding."""
    V0 = as_tensor("V0", V0).detach()
    if V0.ndim > 3:
        raise ValueError(f"V0 must be square, [m, m] or [samples, m, m], got shape {tuple(V0.shape)}")
    if V0.is_complex():
        raise ValueError(f"V0 must be real, got {V0.dtype}")
    V0 = V0.to(torch.float64)
    check_covariance(V0, "V0")
    V0 = symmetrise(V0)
    least = torch.linalg.eigvalsh(scale_to_unit(V0)[0])[..., :1, None]
    indefinite = least < -8 * V0.shape[-1] * torch.finfo(V0.dtype).eps
    if indefinite.any():
        root = eigen_factor(V0)
        V0 = torch.where(indefinite, symmetrise(root @ root.mT), V0)
    cast = V0.to(dtype)
    if not cast.isfinite().all():
        raise ValueError(f"V0 must fit into {dtype}, got an entry {V0.abs().max().item():.3g}")
    if cast.ndim == 2:
        return cast.expand(samples or 1, -1, -1)
    if samples not in (None, cast.shape[0]):
        raise ValueError(f"samples must be {cast.shape[0]}, the number of matrices in V0, or left out, got {samples}")
    return cast


def check_rank(V0: Any, n: int) -> None:
    """Raises a ValueError if no tokens of n features have this covariance."""
    m = count_tokens(V0)
    if m <= n:
        return
    values = torch.linalg.eigvalsh(scale_to_unit(prepare_start(V0, None, torch.float64))[0])
    rank = int((values > NEGLIGIBLE * m).sum(-1).max())
    if rank > n:
        raise ValueError(f"n must be at least {rank}, the rank of V0: fewer features cannot have this covariance of {m} tokens, got {n}")


def take_block(V0: Float[Tensor, "sample m m"], block: int, size: int) -> Float[Tensor, "batch m m"]:
    """The starts of one block, in memory of their own: pickling a slice would pickle the whole of V0. One start for all stays shared."""
    start = V0[block * size : (block + 1) * size]
    return start if start.stride(0) == 0 else start.clone()


def draw_start(V0: Float[Tensor, "batch m m"], n: int, stream: Stream) -> Float[Tensor, "batch m n"]:
    """Tokens with covariance V0, of rank n at most. V0 determines them up to a rotation of the features, which is drawn uniformly."""
    L = factor(V0).contiguous() if V0.shape[-1] <= n else narrow_factor(V0.contiguous(), n)
    return math.sqrt(n) * L @ draw_directions(len(V0), L.shape[-1], n, stream)


def draw_directions(batch: int, m: int, n: int, stream: Stream) -> Float[Tensor, "batch m n"]:
    """m orthonormal rows of n features, in a uniform rotation."""
    Q, R = torch.linalg.qr(stream.normal(batch, n, m))
    return (Q * R.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]).mT  # without the sign Q's signs are LAPACK's choice, not uniform
