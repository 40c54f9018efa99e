"""Checks of a layer's law: against networks with explicit weights, and against the limit with its rate in n."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from shaped.covariance import vech
from shaped.finite import propagate
from shaped.layers.base import Layer, Sizes
from shaped.testing.stats import assert_products, assert_rejected, assert_same_moments, generator, on_cpu, random_covariance, seed

LARGE = 0.13  # change of a covariance from n to 4n, as a share of Sigma, half of whose square would hide an error of 5 %


@on_cpu()
def check_module(
    layer: Layer, m: int = 3, n: int | None = None, n_k: int | None = None, networks: int = 6000, samples: int = 60_000
) -> None:
    """One step of `propagate` has the law of one step of `module`: means, covariances, third moments. n is 12, n_k is 5, or the next that
    fits."""
    n = find_width(layer, max(12, m)) if n is None else n
    n_k = find_key_width(layer, n, 5) if n_k is None else n_k
    V, g = random_covariance(m, 50), generator(51)
    explicit = torch.empty(networks, m, m, dtype=torch.float64)
    with torch.no_grad():
        for i in range(networks):
            X = layer.module(n, n_k, generator=g, dtype=torch.float64)(draw_tokens(V, n, g))
            explicit[i] = X @ X.mT / n
    for path in ("tokens",) if layer.needs_tokens else ("tokens", "gram"):
        drawn = propagate(layer, V, n=n, n_k=n_k, d=1, samples=samples, seed=seed(52), path=path, record="last")
        assert drawn.info["path"] == path, f"path must be {path}, got {drawn.info['path']}"
        assert_same_moments(vech(drawn.V[-1]), vech(explicit))


def draw_tokens(V: Tensor, n: int, g: torch.Generator, batch: tuple[int, ...] = ()) -> Tensor:
    """Tokens with covariance V in a uniformly random direction: whitened normals, so that no convention of a factorisation enters.

    With more tokens than features V has a rank of n at most.
    """
    if len(V) > n:
        U, S, _ = torch.linalg.svd(V)
        root = U[:, :n] * S[:n].sqrt()
    else:
        root = torch.linalg.cholesky(V)
    Z = torch.randn(*batch, root.shape[-1], n, generator=g, dtype=torch.float64, device=g.device)
    values, vectors = torch.linalg.eigh(Z @ Z.mT)
    return math.sqrt(n) * root.to(Z) @ (vectors / values.sqrt()[..., None, :] @ vectors.mT @ Z)


@on_cpu()
def check_Sigma_of_steps(layer: Layer, m: int = 3, n: int = 64, samples: int = 150_000, n_k: int | None = None) -> None:
    """n·Cov[V'] → Sigma. An error of 5 % is rejected: a standard error is 0.6 % of the variance.

    The bias is C/n: a term in n^(-1/2) would be the covariance of an even and an odd function of the weights, which is 0. It cancels in
    (4·Cov at 4n - Cov at n)/3. Half the square of the change from n to 4n is allowed for what is left. Where that change is large, wider
    networks are taken, up to 64n.
    """
    V = random_covariance(m, 57)
    Sigma = layer.Sigma(V)
    scale = Sigma.max().item()

    def draw_centred(n: int, literal: int) -> Tensor:
        V1 = propagate(layer, V, n=n, n_k=n_k, d=1, samples=samples, seed=seed(literal), record="last").V[-1]
        return vech(V1 - V1.mean(0))

    narrow, wide = draw_centred(n, 58), draw_centred(4 * n, 59)

    def find_change() -> float:
        return (4 * n * (wide.mT @ wide) - n * (narrow.mT @ narrow)).abs().max().item() / samples / scale

    for literal in (60, 61):
        if find_change() > LARGE:
            n, narrow, wide = 4 * n, wide, draw_centred(16 * n, literal)
    extrapolated, left = [(16 * n / 3, wide), (-n / 3, narrow)], (0.005 + find_change() ** 2 / 2) * scale
    assert_products(extrapolated, Sigma, bias=left)
    for wrong in (0.95, 1.05):
        assert_rejected(lambda wrong=wrong: assert_products(extrapolated, wrong * Sigma, bias=left))


@on_cpu()
def check_survival(layer: Layer, m: int = 3, widths: tuple[int, ...] | None = None) -> None:
    """Networks give finite numbers also where tokens coincide or have lengths near the ends of the float range.

    `widths` are by default the narrowest that m tokens and the layer allow, and 32.
    """
    eye, ones = torch.eye(m, dtype=torch.float64), torch.ones(m, m, dtype=torch.float64)
    for V0 in (ones, 1e60 * ones, 1e60 * eye, 1e-60 * eye, 1e75 * eye):
        size = V0.max().item()
        for n in widths or (find_width(layer, m + 1), find_width(layer, max(32, m))):
            paths = propagate(layer, V0, n=n, d=12, samples=16, seed=seed(62))
            for name, values in (("V", paths.V), ("rho", paths.rho)):
                assert values.isfinite().all(), f"{name} must be finite, from tokens of variance {size:g}"
            # a path whose V is nan stops and shows its last V; only from 1e75 may it leave the float range
            stopped = paths.stopped.isfinite()
            assert size > 1e60 or not stopped.any(), f"V must stay finite, got nan or inf at n = {n}, from tokens of variance {size:g}"


def find_width(layer: Layer, least: int) -> int:
    """The smallest width, at least this, that the layer can have."""
    return _find_sizes(layer, (Sizes(n) for n in range(least, 2**12)), f"a width between {least} and {2**12}").n


def find_key_width(layer: Layer, n: int, least: int) -> int:
    """The smallest width of a head's keys, at least this where there is one, that the layer can have at width n."""
    widths = (*range(least, 2**12), *range(1, least))
    return _find_sizes(layer, (Sizes(n, n_k) for n_k in widths), f"keys of a width below {2**12}").keys(1)


def _find_sizes(layer: Layer, candidates: Iterable[Sizes], wanted: str) -> Sizes:
    for sizes in candidates:
        try:
            layer.check_sizes(sizes)
        except ValueError:
            continue
        return sizes
    raise ValueError(f"layer must allow {wanted}, got {layer!r}")
