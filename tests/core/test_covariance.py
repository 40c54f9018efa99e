"""Covariances of tokens: Gram matrices, correlations, factors also of collapsed ones, products, effective rank."""

import pytest
import torch

from shaped import covariance
from shaped.covariance import (
    FEW,
    correlation,
    effective_rank,
    equicorrelated,
    exceeds,
    factor,
    gram,
    make_batch_innermost,
    product,
    running_means,
    vech,
    weighted_mean,
)
from shaped.testing.stats import generator, random_covariance


def test_gram_and_correlation():
    X = torch.tensor([[3.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    assert torch.equal(gram(X), torch.tensor([[4.5, 1.5], [1.5, 1.0]], dtype=torch.float64))
    assert correlation(gram(X))[0, 1] == pytest.approx(0.5**0.5)
    assert correlation(torch.zeros(2, 2))[0, 1] == 0.0
    assert correlation(torch.ones(3, 3)).diagonal().eq(1).all()


def test_equicorrelated():
    V = equicorrelated(4, -1 / 3, variance=2.0)
    assert torch.linalg.eigvalsh(V)[0] == pytest.approx(0.0, abs=1e-12)
    assert V.diagonal().eq(2.0).all()


def test_vech_is_the_upper_triangle_row_by_row():
    assert vech(torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [3.0, 5.0, 6.0]])).tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("m", [1, 2, 4, FEW, FEW + 1, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factor(m, dtype):
    eps = torch.finfo(dtype).eps
    full = random_covariance(m, m, (5,)).to(dtype)
    thin = torch.randn(5, m, 1, generator=generator(m), dtype=torch.float64).to(dtype)
    scales = 10.0 ** torch.arange(m, dtype=torch.float64).to(dtype)
    for V in (full, make_batch_innermost(full), thin @ thin.mT, torch.ones(5, m, m, dtype=dtype), full * scales * scales[:, None]):
        L = factor(V)
        lengths = V.diagonal(dim1=-2, dim2=-1).sqrt()
        # relative to the tokens' own lengths, which may differ by orders of magnitude
        assert ((L @ L.mT - V).abs() <= 20 * m * eps * lengths[:, :, None] * lengths[:, None, :]).all()


@pytest.mark.parametrize(("m", "n"), [(4, 2), (FEW, 4), (8, 4), (24, 16), (64, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factor_of_more_tokens_than_features(m, n, dtype):
    scales = torch.logspace(-6, 6, m, dtype=dtype)[:, None]
    X = torch.randn(16 if m > FEW else 4000, m, n, generator=generator(m), dtype=torch.float64).to(dtype) * scales
    V = X @ X.mT / n
    L = factor(V)
    assert L.triu(1).eq(0).all()
    assert ((L @ L.mT - V).abs() <= 16 * torch.finfo(dtype).eps ** 0.5 * 4 * scales * scales.T).all()


def test_only_columns_from_the_first_repeated_token_on_are_done_one_by_one(monkeypatch):
    """In one matrix LAPACK finds the second of two equal tokens, in another it fails there."""
    X = torch.randn(2, 32, 40, generator=generator(0), dtype=torch.float64)
    X[:, 20], X[0, 30] = X[:, 3], X[0, 25]
    V = X @ X.mT / 40
    V[1, 20, 20] -= 1e-14
    sizes: list[int] = []

    def factor_by_columns(V, floor, bounded):
        sizes.append(V.shape[-1])
        return by_columns(V, floor, bounded)

    by_columns = covariance._cholesky_by_columns
    monkeypatch.setattr(covariance, "_cholesky_by_columns", factor_by_columns)
    L = factor(V)
    assert sizes == [12]
    assert (L @ L.mT - V).abs().max() < 1e-12
    floor = V.diagonal(dim1=-2, dim2=-1) * (4 * 32 * torch.finfo(V.dtype).eps)
    assert torch.allclose(L[..., :20], by_columns(V, floor, True)[0][..., :20], atol=1e-12)


@pytest.mark.parametrize("m", [3, FEW + 2])
def test_factor_of_what_is_empty_or_not_finite(m):
    V = torch.eye(m, dtype=torch.float64).repeat(3, 1, 1)
    V[0, 1, 1] = 0.0
    V[1, 0, 0] = torch.inf
    L = factor(V)
    assert torch.allclose(L[0] @ L[0].mT, V[0], atol=1e-100)
    assert not L[1].isfinite().all()
    assert torch.allclose(L[2], V[2])


@pytest.mark.parametrize("m", [1, 3, FEW, FEW + 1])
def test_products_for_few_and_many(m):
    g = generator(m)
    A, B = (torch.randn(7, m, m, generator=g, dtype=torch.float64) for _ in range(2))
    P = torch.rand(m, m, generator=g, dtype=torch.float64)
    for layout in (lambda x: x, make_batch_innermost):
        assert torch.allclose(product(layout(A), layout(B)), A @ B, atol=1e-13)
        assert torch.allclose(product(P, layout(B)), P @ B, atol=1e-13)
        assert torch.allclose(product(layout(A), P.mT), A @ P.mT, atol=1e-13)
        assert torch.allclose(weighted_mean(P, layout(A)), (P * A).sum(-1, keepdim=True), atol=1e-13)


@pytest.mark.parametrize("m", [1, 2, FEW, FEW + 1])
@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, make_batch_innermost])
def test_running_means_are_a_product_with_a_triangle(m, layout):
    A = layout(torch.randn(1024, m, m, generator=generator(m), dtype=torch.float64))
    P = torch.ones(m, m, dtype=torch.float64).tril() / torch.arange(1, m + 1)[:, None]
    before = A.clone()
    for given in (A, A.mT, A[:2]):
        assert torch.allclose(running_means(given), given @ P.mT, atol=1e-14)
    assert torch.equal(A, before)


def test_exceeds():
    """Also where the sum of the eigenvalues is above the bound, and the largest is not."""
    V = torch.diag_embed(torch.tensor([[1.0, 1.0, 0.5], [2.0, 2.0, 2.0], [0.0, 2.5, 0.0], [0.0, 9.0, 1.0]], dtype=torch.float64))
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator(0), dtype=torch.float64))[0]
    V = turn @ V @ turn.mT
    assert exceeds(V, 2.6).tolist() == [False, False, False, True]
    assert exceeds(V, 2.2).tolist() == [False, False, True, True]
    assert exceeds(V, 10.5).tolist() == [False] * 4
    assert exceeds(V[:3], 6.5).tolist() == [False] * 3
    assert exceeds(V[3], 8.5)


def test_effective_rank():
    """m for orthogonal tokens, 1 for parallel ones; else from the eigenvalues 1 + (m-1)ρ and 1 - ρ."""
    assert effective_rank(torch.eye(4)).item() == pytest.approx(4.0)
    assert effective_rank(equicorrelated(4, 1.0)).item() == pytest.approx(1.0, abs=1e-6)
    shares = torch.tensor([1.0 + 3 * 0.5, 0.5, 0.5, 0.5]) / 4
    expected = shares.pow(-shares).prod().item()
    assert effective_rank(7.0 * equicorrelated(4, 0.5)).item() == pytest.approx(expected)
