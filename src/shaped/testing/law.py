"""Checks of a layer's law: against networks with explicit weights, and against the limit with its rate in n."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from shaped.covariance import factor, vech
from shaped.finite import propagate
from shaped.layers.base import Layer, ResidualLayer, Sizes
from shaped.randomness import Stream
from shaped.testing.stats import assert_products, assert_rejected, assert_same_moments, generator, random_covariance, seed, split_samples

CPU = torch.device("cpu")


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
    """Tokens with covariance V in a uniformly random direction: whitened normals, so that no convention of a factorisation enters."""
    Z = torch.randn(*batch, len(V), n, generator=g, dtype=torch.float64, device=g.device)
    values, vectors = torch.linalg.eigh(Z @ Z.mT)
    return math.sqrt(n) * torch.linalg.cholesky(V).to(Z) @ (vectors / values.sqrt()[..., None, :] @ vectors.mT @ Z)


def check_drift_of_branch(
    layer: ResidualLayer,
    m: int = 3,
    n: int = 64,
    samples: int = 800_000,
    reject: bool = True,
    control: ResidualLayer | None = None,
    n_k: int | None = None,
) -> None:
    """n·E[V' - V] → b for a residual layer, with a bias that halves when n doubles. An error of 5 % is rejected if `reject`.

    `control` is a layer with drift 0 that draws the same normals, such as `ShapedFeedForward(gamma, 0.0, 0.0)` for a feed-forward layer.
    Its samples are subtracted, which removes most of the noise. `n_k` is the width of the keys at every n; by default n over the heads.
    """
    V = random_covariance(m, 56)
    b = vech(layer.drift(V))
    scale = _find_scale(b, V)
    drawn = [_branch_drifts(layer, V, Sizes(k * n, n_k), samples).double() for k in (1, 2, 4)]
    if control is not None:
        assert control.drift(V).abs().max() == 0.0, f"control must have drift 0, got {control!r}"
        drawn = [x - _branch_drifts(control, V, Sizes(k * n, n_k), samples).double() for x, k in zip(drawn, (1, 2, 4), strict=True)]
    means, errors = [x.mean(0) for x in drawn], [x.std(0) / len(x) ** 0.5 for x in drawn]
    C = 20.0 * scale
    for k, mean, error in zip((1, 2, 4), means, errors, strict=True):
        assert ((mean - b).abs() < 5 * error + C / (k * n)).all(), f"n·E[V' - V] must approach the drift, got {mean} and {b} at n = {k * n}"
    # the bias C/n: from n to 2n it changes by C/2n, from 2n to 4n by half of that
    change, next_change = means[1] - means[0], means[2] - means[1]
    uncertain = (errors[0] ** 2 / 4 + (1.5 * errors[1]) ** 2 + errors[2] ** 2).sqrt()
    assert ((next_change - change / 2).abs() < 5 * uncertain + 0.35 * change.abs().max() + 1e-9 * scale).all(), (
        "the bias must halve when n doubles"
    )
    extrapolated, error = 2 * means[2] - means[1], (4 * errors[2] ** 2 + errors[1] ** 2).sqrt()
    _assert_drift(extrapolated, error, b, scale, left=0.006, reject=reject)


class MirroredStream(Stream):
    """The same draws, with the sign of the logits and of hidden features turned."""

    sign = -1.0

    def fill(self, buffer: Tensor) -> Tensor:
        return super().fill(buffer).mul_(self.sign)

    def bartlett(self, like: Tensor, size: int, degrees: int) -> Tensor:
        """As it is: turned together with what it multiplies, it would leave the logits' sign as it was."""
        self.sign = 1.0
        T = super().bartlett(like, size, degrees)
        self.sign = -1.0
        return T

    def rows(self, like: Tensor, size: int, degrees: int) -> Tensor:
        """As it is, for the same reason."""
        return -super().rows(like, size, degrees)


def _branch_drifts(layer: ResidualLayer, V: Tensor, sizes: Sizes, samples: int) -> Tensor:
    """Samples with mean n·E[V' - V], [sample, p].

    Given F, the mean over the values' weights is exact, E[V'] = lam² V + gamma² F Fᵀ, so only F is drawn. Logits and hidden features
    come in pairs of both signs, which removes everything that is odd in them.
    """
    drifts, same_draws = list[Tensor](), seed(55)
    for number, block in enumerate(split_samples(samples)):
        L, insides = factor(V.expand(block, *V.shape)), list[Tensor]()
        for source in (Stream, MirroredStream):
            slices = layer.branch(L, sizes, source(same_draws, number, dtype=V.dtype, device=CPU))
            insides.append(torch.stack([F @ F.mT for F in slices]).mean(0))
        drifts.append(sizes.n * ((layer.shortcut**2 - 1) * vech(V) + layer.gamma**2 * vech(insides[0] + insides[1]) / 2))
    return torch.cat(drifts)


def check_drift_of_steps(layer: Layer, m: int = 3, n: int = 128, samples: int = 2_000_000, reject: bool = True) -> None:
    """The same for any layer, from whole steps at n and 2n, whose biases C/n cancel. Whole steps are noisy: this needs a large drift."""
    V = random_covariance(m, 56)
    b = vech(layer.drift(V))
    means, errors = [], []
    for width in (n, 2 * n):
        after = propagate(layer, V, n=width, d=1, samples=samples, seed=seed(66), record="last").V[-1]
        x = width * vech(after - V)
        means.append(x.mean(0))
        errors.append(x.std(0) / samples**0.5)
    extrapolated, error = 2 * means[1] - means[0], (4 * errors[1] ** 2 + errors[0] ** 2).sqrt()
    _assert_drift(extrapolated, error, b, _find_scale(b, V), left=0.01, reject=reject)


def _find_scale(b: Tensor, V: Tensor) -> Tensor:
    """What errors are measured in: the largest entry of the drift, or of V where there is no drift."""
    return b.abs().max() if b.any() else V.max()


def _assert_drift(found: Tensor, error: Tensor, b: Tensor, scale: Tensor, left: float, reject: bool) -> None:
    def check(expected: Tensor) -> None:
        assert ((found - expected).abs() < 5 * error + left * scale).all(), f"drift must be {found}, as networks have it, got {b}"

    check(b)
    if reject:
        wrong = 0.05 * (b if b.any() else scale)
        assert_rejected(lambda: check(b - wrong))
        assert_rejected(lambda: check(b + wrong))


def check_Sigma_of_steps(layer: Layer, m: int = 3, n: int = 64, samples: int = 400_000, n_k: int | None = None) -> None:
    """n·Cov[V'] → Sigma, with a bias C/n. An error of 5 % is rejected."""
    V = random_covariance(m, 57)
    Sigma = layer.Sigma(V)

    def draw_centred(n: int) -> Tensor:
        V1 = propagate(layer, V, n=n, n_k=n_k, d=1, samples=samples, seed=seed(58), record="last").V[-1]
        return vech(V1 - V1.mean(0))

    once, twice = (n, draw_centred(n)), (2 * n, draw_centred(2 * n))
    C = 25.0 * Sigma.max().item()
    assert_products([once], Sigma, bias=C / n)
    assert_products([twice], Sigma, bias=C / (2 * n))
    extrapolated = [(4 * n, twice[1]), (-n, once[1])]  # twice that at 2n, less that at n: the bias cancels
    assert_products(extrapolated, Sigma, bias=0.01 * Sigma.max().item())
    for wrong in (0.95, 1.05):
        assert_rejected(lambda wrong=wrong: assert_products(extrapolated, wrong * Sigma, bias=0.01 * Sigma.max().item()))


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
