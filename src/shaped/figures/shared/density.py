"""Density estimates. They are computed with the other numbers, so that drawing computes nothing."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float


def kernel_density(x: Float[np.ndarray, " sample"], grid: Float[np.ndarray, " point"]) -> Float[np.ndarray, " point"]:
    """Gaussian kernel density estimate with Silverman's bandwidth."""
    spread = min(np.std(x), np.subtract(*np.percentile(x, [75, 25])) / 1.349) or np.std(x)
    width = max(0.9 * spread * len(x) ** -0.2, 1e-6 * (grid[-1] - grid[0]))
    density = np.zeros_like(grid)
    for part in np.array_split(x, max(1, len(x) // 4096)):
        density += np.exp(-0.5 * ((grid[:, None] - part) / width) ** 2).sum(1)
    return density / (len(x) * width * math.sqrt(2 * math.pi))


def correlation_density(rho: Float[np.ndarray, " sample"], grid: Float[np.ndarray, " point"]) -> Float[np.ndarray, " point"]:
    """Kernel density estimate of correlations: made for artanh(rho), which is unbounded, so that no mass leaks beyond -1 and 1."""
    inside = 1.0 - 1e-12
    z = np.arctanh(np.clip(grid, -inside, inside))
    return kernel_density(np.arctanh(np.clip(rho, -inside, inside)), z) / (1.0 - np.clip(grid, -inside, inside) ** 2)


def pairs(V: Float[np.ndarray, "*batch m m"]) -> Float[np.ndarray, "*batch pair"]:
    """The entries above the diagonal."""
    rows, columns = np.triu_indices(V.shape[-1], 1)
    return V[..., rows, columns]


def joint_densities(name: str, samples: dict[str, Float[np.ndarray, " _"]]) -> dict[str, np.ndarray]:
    """`densities` of several samples over one common range; keys are {name}_{sample}_…"""
    pooled = np.concatenate(list(samples.values()))
    return {key: array for which, x in samples.items() for key, array in densities(f"{name}_{which}", x, 32, pooled).items()}


def densities(
    name: str, x: Float[np.ndarray, " sample"], bins: int = 60, over: Float[np.ndarray, " other"] | None = None
) -> dict[str, np.ndarray]:
    """Histogram and kernel density estimate over the range of the middle 99 % of the values, or of the values in `over`.

    A name that starts with "rho" is a correlation: its range is (-1, 1).
    """
    over = x if over is None else over
    low, high = np.percentile(over, [0.5, 99.5]) if over.size else (0.0, 1.0)
    margin = max(0.05 * (high - low), 1e-6 * max(1.0, abs(low), abs(high)))
    low, high, estimate = (-0.999, 0.999, correlation_density) if name.startswith("rho") else (low - margin, high + margin, kernel_density)
    grid = np.linspace(low, high, 256)
    counts, edges = np.histogram(x, bins=bins, range=(low, high))
    return {
        f"{name}_grid": grid,
        f"{name}_density": estimate(x, grid) if x.size else np.zeros_like(grid),
        f"{name}_edges": edges,
        f"{name}_heights": counts / (max(1, len(x)) * np.diff(edges)),
    }
