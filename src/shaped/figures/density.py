"""Density estimates, made with the numbers so that drawing needs none."""

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
    """The same for correlations: estimated for artanh(rho), which has no ends, so that no mass leaks beyond -1 and 1."""
    inside = 1.0 - 1e-12
    z = np.arctanh(np.clip(grid, -inside, inside))
    return kernel_density(np.arctanh(np.clip(rho, -inside, inside)), z) / (1.0 - np.clip(grid, -inside, inside) ** 2)


def pairs(V: Float[np.ndarray, "*batch m m"]) -> Float[np.ndarray, "*batch pair"]:
    """The entries above the diagonal."""
    rows, columns = np.triu_indices(V.shape[-1], 1)
    return V[..., rows, columns]
