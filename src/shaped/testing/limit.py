"""Checks of a layer's limit: drift, noise, Sigma, and the solver's step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from shaped.covariance import FEW, Point, make_batch_innermost, vech
from shaped.layers.base import Layer
from shaped.layers.terms import Term
from shaped.randomness import GeneratorNormals
from shaped.testing.stats import (
    assert_covariance,
    assert_mean,
    assert_products,
    assert_rejected,
    generator,
    on_cpu,
    random_covariance,
    seed,
    split_samples,
)


@on_cpu()
def check_symmetry(layer: Layer, m: int = 3) -> None:
    """The drift and every draw of the noise are symmetric, and the same generator gives the same noise."""
    V = random_covariance(m, 7, (5,))
    one, two = (layer.noise(V, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, two), "noise must be a function of V and the generator"
    assert torch.equal(one, one.mT), "noise must be symmetric"
    b = layer.drift(V)
    assert torch.allclose(b, b.mT, rtol=1e-12, atol=1e-14), "drift must be symmetric"


@on_cpu()
def check_noise(layer: Layer, m: int = 3, samples: int = 100_000) -> None:
    """The noise has mean 0 and covariance Sigma. An error of 5 % in Sigma is rejected: it is 11 standard errors of a variance."""
    V, g = random_covariance(m, 5), generator(6)
    draws = torch.cat([vech(layer.noise(_repeat(V, block), g)) for block in split_samples(samples)])
    Sigma = layer.Sigma(V)
    assert_mean(draws, 0.0)
    assert_covariance(draws, Sigma)
    assert_rejected(lambda: assert_covariance(draws, 1.05 * Sigma))


@on_cpu()
def check_Sigma(layer: Layer, tokens: Iterable[int] = range(2, 7)) -> None:
    """Sigma is positive semi-definite for these numbers of tokens."""
    for m in tokens:
        eigenvalues = torch.linalg.eigvalsh(layer.Sigma(random_covariance(m, m, (8,))))
        assert (eigenvalues[:, 0] >= -1e-12 * eigenvalues[:, -1]).all(), f"Sigma must be positive semi-definite, for {m} tokens too"


@on_cpu()
def check_batches(layer: Layer, m: int = 3) -> None:
    """Drift and Sigma of a batch are those of its matrices."""
    V = random_covariance(m, 8, (2, 3))
    for function in (layer.drift, layer.Sigma):
        whole = function(V)
        name, one = function.__name__, function(V[1, 2])
        assert whole.shape == (2, 3, *one.shape), f"{name} of a batch [2, 3, m, m] must be {[2, 3, *one.shape]}, got {list(whole.shape)}"
        assert torch.allclose(whole[1, 2], one, rtol=1e-13, atol=1e-15), f"{name} of a batch must be that of its matrices"


@on_cpu()
def check_permutation(layer: Layer, m: int = 5) -> None:
    """Permuting the tokens permutes drift and Sigma. Not for layers with a mask."""
    V, order = random_covariance(m, 9), torch.randperm(m, generator=generator(9))
    shuffled = V[order][:, order]
    alike = torch.allclose(layer.drift(shuffled), layer.drift(V)[order][:, order], rtol=1e-12, atol=1e-14)
    assert alike, "drift must be permuted with the tokens; symmetric=False is for a layer with a mask"
    rows, columns = torch.triu_indices(m, m)
    label = torch.empty(m, m, dtype=torch.long)
    label[rows, columns] = label[columns, rows] = torch.arange(len(rows))
    same = label[order[rows], order[columns]]
    alike = torch.allclose(layer.Sigma(shuffled), layer.Sigma(V)[same][:, same], rtol=1e-12, atol=1e-14)
    assert alike, "Sigma must be permuted with the tokens; symmetric=False is for a layer with a mask"


@on_cpu()
def check_chain(layer: Layer, other: Layer, m: int = 3) -> None:
    """Drift and Sigma of a chain are the sums, in both orders."""
    V = random_covariance(m, 13, (4,))
    for chain in (layer >> other, other >> layer):
        for name in ("drift", "Sigma"):
            total = getattr(layer, name)(V) + getattr(other, name)(V)
            assert torch.allclose(getattr(chain, name)(V), total, rtol=1e-13, atol=1e-15), f"{name} of {chain!r} must be the sum"


@on_cpu()
def check_solver_step(layer: Layer, m: int = 3) -> None:
    """A small step of the solver has the limit's moments: E[V'] = V + h b + O(h²) and Cov[V'] = h Sigma + O(h²), as weak order 1 needs.

    An error of 5 % in Sigma is rejected.
    """
    V = random_covariance(m, 11) / 2  # attention is slow here: it takes both steps whole
    h = min(0.02, *(term.longest(m) for term in layer.terms))  # and so do the weights: in parts, the term in h would be another one
    drift, products = step_moments(layer.terms, V, h)
    Sigma = layer.Sigma(V)
    left = 10 * 0.02**2 * Sigma.max().item()  # O(h²)
    assert_mean(drift, vech(layer.drift(V)), bias=left)
    assert_products(products, Sigma, bias=left)
    assert_rejected(lambda: assert_products(products, 1.05 * Sigma, bias=left))


def step_moments(terms: Iterable[Term], V: Tensor, h: float = 0.02) -> tuple[Tensor, list[tuple[float, Tensor]]]:
    """Samples whose mean is the drift, and parts whose products have the covariance as mean, as h goes to 0.

    Two step sizes with the same normals remove the term in h.
    """
    terms, literal = tuple(terms), seed(12)
    (full, mirrored_full), (half, mirrored_half) = (_one_step(terms, V, step, literal) for step in (h, h / 2))
    drift = (2 * half - full + 2 * mirrored_half - mirrored_full) / 2
    return drift, [(h, half - half.mean(0)), (-h, full - full.mean(0))]  # 2·h/2 - h


class MirroredNormals(GeneratorNormals):
    """The same normals with the other sign. The mean over both runs has no odd terms."""

    def normal(self, *shape: int) -> Tensor:
        return -super().normal(*shape)


def _one_step(terms: tuple[Term, ...], V: Tensor, h: float, literal: int, samples: int = 100_000) -> Iterator[Tensor]:
    """The upper triangle of (V' - V)/h after one step, for normals and for mirrored normals."""
    for source in (GeneratorNormals, MirroredNormals):
        normals, moved = source(torch.Generator().manual_seed(literal), V), list[Tensor]()
        for block in split_samples(samples):
            points = Point(matrix=_repeat(V, block))
            for term in terms:
                points = term.move(points, h, normals)
            moved.append((vech(points.V) - vech(V)) / h)
        yield torch.cat(moved)


def _repeat(V: Tensor, count: int) -> Tensor:
    """So many of the matrix, in the memory layout of the solver's paths: others are slow."""
    many = V.expand(count, *V.shape)
    return make_batch_innermost(many) if len(V) <= FEW else many.contiguous()
