"""Statistical checks: z standard errors and a declared bias, nothing else. Each rejects an error of 5 % (tests/core/test_stats.py)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

Z = 5.0
KS_AT_Z = 2.74  # sqrt(N) times a Kolmogorov-Smirnov distance exceeds this as seldom as a normal exceeds z = 5 (6e-7)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Within it tensors are made on the CPU, as those of a layer that is checked are, whatever the caller's default device is."""
    with torch.device("cpu"):
        yield


def seed(literal: int) -> int:
    """The literal seed, or a fresh one each time when SHAPED_FREE_SEEDS=1."""
    return secrets.randbits(31) if os.environ.get("SHAPED_FREE_SEEDS") == "1" else literal


def generator(literal: int) -> torch.Generator:
    """A generator on the CPU with this `seed`."""
    return torch.Generator().manual_seed(seed(literal))


@on_cpu()
def random_covariance(m: int, number: int, batch: tuple[int, ...] = ()) -> Tensor:
    """A matrix to test at, the same for the same number also when seeds are unlocked: what a test allows is declared for this matrix."""
    X = torch.randn(*batch, m, m + 2, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return X @ X.mT / (m + 2)


def split_samples(samples: int, block: int = 8192) -> list[int]:
    """Sizes of blocks that sum to `samples`. What is drawn by blocks stays in the processor's cache: it takes half the time."""
    return [min(block, samples - first) for first in range(0, samples, block)]


def assert_mean(samples: Tensor, expected: Tensor | float, *, bias: Tensor | float = 0.0, z: float = Z) -> None:
    """The mean over the first dimension is `expected`, entry by entry, up to z standard errors and a declared bias."""
    _assert_close(samples.mean(0), samples.std(0) / len(samples) ** 0.5, expected, bias, z)


def _assert_close(mean: Tensor, error: Tensor, expected: Tensor | float, bias: Tensor | float, z: float) -> None:
    off = (mean - expected).abs() - bias
    worst = (off / error.clamp(min=1e-300)).max().item()
    assert worst < z, f"the mean is {worst:.1f} standard errors off, after a declared bias of {bias}"


def assert_covariance(samples: Tensor, expected: Tensor, *, bias: float = 0.0, z: float = Z) -> None:
    """The covariance of rows [sample, p] is `expected`, [p, p], entry by entry."""
    assert_products([(1.0, samples - samples.mean(0))], expected, bias=bias, z=z)


def assert_products(parts: Sequence[tuple[float, Tensor]], expected: Tensor, *, bias: float = 0.0, z: float = Z) -> None:
    """The mean of sum_k w_k x_k[:, i] x_k[:, j] over the samples is `expected`, [p, p], entry by entry; a part is (w_k, x_k [sample, p]).

    Mean and variance of the products come from matrix products. The products of every sample would take ten times as long.
    """
    count = len(parts[0][1])
    mean = torch.stack([w * (x.mT @ x) for w, x in parts]).sum(0) / count
    square = torch.stack([w * v * ((x * y).mT @ (x * y)) for w, x in parts for v, y in parts]).sum(0) / count
    _assert_close(mean, ((square - mean**2).clamp(min=0.0) / (count - 1)).sqrt(), expected, bias, z)


def assert_same_moments(x: Tensor, y: Tensor, *, z: float = Z) -> None:
    """Two samples of rows [sample, p] agree in their means, covariances and third moments."""

    def moments(rows: Tensor) -> Tensor:
        centred = rows - rows.mean(0)
        squares = (centred[:, :, None] * centred[:, None, :]).flatten(1)
        # what estimating the mean adds to the error of a third moment: its influence is -3 Var·(x - mean)
        cubes = centred**3 - 3 * centred.var(0) * centred
        return torch.cat([rows, squares, cubes], 1)

    a, b = moments(x), moments(y)
    error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
    worst = ((a.mean(0) - b.mean(0)).abs() / error.clamp(min=1e-300)).max().item()
    assert worst < z, f"the samples' moments are {worst:.1f} standard errors apart"


def assert_distribution(samples: Tensor, points: np.ndarray, cdf: np.ndarray, *, bias: float = 0.0) -> None:
    """The samples follow the distribution function given at `points` (Kolmogorov-Smirnov)."""
    x = np.sort(samples.numpy())
    F = np.interp(x, points, cdf)
    ranks = np.arange(len(x) + 1) / len(x)
    distance = max(np.abs(F - ranks[1:]).max(), np.abs(F - ranks[:-1]).max())
    limit = KS_AT_Z / len(x) ** 0.5 + bias
    assert distance < limit, f"Kolmogorov-Smirnov distance {distance:.4f}, at most {limit:.4f} is allowed"


def assert_rejected(check: Callable[[], None]) -> None:
    """The check must fail: for a value that is wrong, to show that the check has the power to see it."""
    try:
        check()
    except AssertionError:
        return
    raise AssertionError(
        "the check accepts a value that is 5 % off: it needs more samples, wider networks, or a layer with a larger effect"
    )
