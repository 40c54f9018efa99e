"""Covariance matrices of tokens: V = X Xᵀ / n, their correlations, and factors that survive collapse."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from shaped.checks import as_tensor, check_device, finite, positive, whole_number

Matrix = Float[Tensor, "*batch m m"]


def largest_safe(dtype: torch.dtype) -> float:
    """A covariance must stay below it, or its cube, which the drift takes, overflows."""
    return torch.finfo(dtype).max ** 0.25


def exceeds(V: Matrix, upper: float) -> Bool[Tensor, "*batch"]:
    """Is the largest eigenvalue of a positive semi-definite matrix above `upper`?"""
    # It is at most the sum of all. On a GPU nothing is read back, so that a CUDA graph can hold this.
    if not V.is_cuda and (V.diagonal(dim1=-2, dim2=-1).sum(-1) <= upper).all():
        return torch.zeros(V.shape[:-2], dtype=torch.bool, device=V.device)
    # A matrix is positive definite exactly when its Cholesky factor exists: cheaper than its eigenvalues.
    eye = torch.eye(V.shape[-1], dtype=V.dtype, device=V.device)
    return torch.linalg.cholesky_ex(min(upper, torch.finfo(V.dtype).max) * eye - V).info > 0


def gram(X: Float[Tensor, "*batch m n"]) -> Matrix:
    r"""The neural covariance $V = X X^\top / n$ (Sec. 2, "Neural Covariance")."""
    X = as_tensor("X", X)
    if X.ndim < 2 or 0 in X.shape[-2:]:
        raise ValueError(f"X must be tokens, [..., m, n], got shape {tuple(X.shape)}")
    check_floating(X, "X")
    return X @ X.mT / X.shape[-1]


def correlation(V: Matrix) -> Matrix:
    r"""$\rho^{\alpha\beta} = V^{\alpha\beta} (V^{\alpha\alpha} V^{\beta\beta})^{-1/2}$ (Sec. 2), in [-1, 1].

    The correlation of a zero token with every other token is 0.
    """
    V = as_tensor("V", V)
    if 0 not in V.shape[:-2]:  # an empty batch has no matrix to check
        check_square(V, "V")
    inverse_length = V.diagonal(dim1=-2, dim2=-1).rsqrt()
    inverse_length = torch.where(inverse_length.isfinite(), inverse_length, 0.0)
    rho = (V * inverse_length[..., :, None] * inverse_length[..., None, :]).clamp(-1.0, 1.0)
    rho.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return rho


def inverse_length(v: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch m"]:
    """1/sqrt(v) of tokens' variances, and 0 for a token of length zero: normalised, it stays zero.

    A variance below the dtype's smallest number to the power 3/4 counts as zero: `factor` raises a zero token's variance to the smallest
    number, and some steps later it is a little larger.
    """
    return torch.where(v > torch.finfo(v.dtype).tiny ** 0.75, v.rsqrt(), 0.0)


def effective_rank(V: Matrix) -> Float[Tensor, "*batch"]:
    r"""$\exp(-\sum_i p_i \log p_i)$ with $p_i$ the eigenvalues of V divided by their sum (Roy and Vetterli, 2007): from 1, where all tokens
    are parallel, to m, where they are orthogonal and of equal length."""
    V = as_tensor("V", V)
    check_square(V, "V")
    values = torch.linalg.eigvalsh(V).clamp(min=0.0)
    shares = values / values.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).exp()


def equicorrelated(
    m: int,
    rho: float,
    variance: float = 1.0,
    *,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
) -> Float[Tensor, "m m"]:
    """m tokens of equal variance, each pair with correlation rho: the start of every figure of the paper."""
    m, rho, variance = whole_number("m", m), finite("rho", rho), positive("variance", variance)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be one of floating point numbers, such as torch.float64, got {dtype}")
    least = -1.0 / (m - 1) if m > 1 else -1.0
    if not least <= rho <= 1.0:
        raise ValueError(f"rho must lie in [-1/(m-1), 1] = [{least:.4g}, 1] for m = {m} tokens, got {rho}")
    where = check_device(device)
    try:
        V = torch.full((m, m), variance * rho, dtype=dtype, device=where)
    except (RuntimeError, TypeError):
        raise ValueError(f"m must be small enough for an m x m matrix to fit into memory, got {m}") from None
    return V.fill_diagonal_(variance)


# Up to this many tokens, sums of outer products over the whole batch beat batched BLAS and LAPACK on the CPU: twofold at 4 tokens
# where the samples lie next to each other in memory (`make_batch_innermost`), as the solver keeps them.
FEW = 7
SMALL = 1024  # entries; for smaller batches one BLAS call is faster than the loop over columns


def make_batch_innermost(V: Shaped[Tensor, "batch m k"]) -> Shaped[Tensor, "batch m k"]:
    """The same tensor, with the batch as its innermost dimension in memory. Element-wise operations keep that layout."""
    return V.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def match_layout(V: Shaped[Tensor, "batch m k"], like: Shaped[Tensor, "batch _ _"]) -> Shaped[Tensor, "batch m k"]:
    """The same tensor in the memory layout of `like`. Operations on two different layouts are slow."""
    return make_batch_innermost(V) if like.stride(0) == 1 else V.contiguous()


def product(A: Float[Tensor, "*#batch m k"], B: Float[Tensor, "*#batch k l"]) -> Float[Tensor, "*batch m l"]:
    """A @ B, fast for many small matrices too."""
    if is_for_blas(A):
        return A @ B
    total = A[..., :, :1] * B[..., :1, :]
    for k in range(1, A.shape[-1]):
        total.addcmul_(A[..., :, k : k + 1], B[..., k : k + 1, :])
    return total


def lower_product(L: Float[Tensor, "*batch m m"], B: Float[Tensor, "*batch m k"]) -> Float[Tensor, "*batch m k"]:
    """L @ B for a lower triangular L."""
    if is_for_blas(L):
        return L @ B
    total = L[..., :, :1] * B[..., :1, :]
    for k in range(1, L.shape[-1]):
        total[..., k:, :].addcmul_(L[..., k:, k : k + 1], B[..., k : k + 1, :])
    return total


def product_lower(A: Float[Tensor, "*batch k m"], L: Float[Tensor, "*batch m m"]) -> Float[Tensor, "*batch k m"]:
    """A @ L for a lower triangular L."""
    if is_for_blas(L):
        return A @ L
    total = A[..., :, -1:] * L[..., -1:, :]
    for k in range(L.shape[-1] - 1):
        total[..., :, : k + 1].addcmul_(A[..., :, k : k + 1], L[..., k : k + 1, : k + 1])
    return total


def lower_gram(L: Float[Tensor, "*batch m m"]) -> Matrix:
    """L @ Lᵀ for a lower triangular L."""
    if is_for_blas(L):
        return L @ L.mT
    total = L[..., :, :1] * L[..., None, :, 0]
    for k in range(1, L.shape[-1]):
        total[..., k:, k:].addcmul_(L[..., k:, k : k + 1], L[..., None, k:, k])
    return total


def running_means(A: Float[Tensor, "*batch k m"]) -> Float[Tensor, "*batch k m"]:
    """In each row the means of its first entry, its first two, and so on."""
    if is_for_blas(A):
        total = A.cumsum(-1)
    else:
        total = A.clone()
        for k in range(1, A.shape[-1]):
            total[..., k].add_(total[..., k - 1])
    return total.div_(torch.arange(1, A.shape[-1] + 1, dtype=A.dtype, device=A.device))


def is_for_blas(A: Tensor) -> bool:
    """Is one call of BLAS or LAPACK faster than a loop over the columns?"""
    return A.shape[-1] > FEW or A.numel() < SMALL


def weighted_mean(P: Float[Tensor, "#rows m"], N: Float[Tensor, "*batch rows m"]) -> Float[Tensor, "*batch rows 1"]:
    """The mean of each row of N under the weights in the same row of P (or in its only row)."""
    if P.shape[-1] > FEW:
        return (P * N).sum(-1, keepdim=True)
    total = P[:, :1] * N[..., :, :1]
    for k in range(1, P.shape[-1]):
        total.addcmul_(P[:, k : k + 1], N[..., :, k : k + 1])
    return total


def factor(V: Matrix) -> Matrix:
    """Some L with L Lᵀ = V to rounding, for any positive semi-definite V, also when tokens coincide.

    It is the Cholesky factor. Pivots are raised to a few units in the last place of the token's variance, which is the size of the
    rounding errors in V. A matrix that is not finite gets a factor that is not finite.
    """
    floor = V.diagonal(dim1=-2, dim2=-1) * (4 * V.shape[-1] * torch.finfo(V.dtype).eps) + torch.finfo(V.dtype).tiny
    if is_for_blas(V):
        L, info = torch.linalg.cholesky_ex(V)
        failed = (info > 0)[..., None] & (torch.arange(V.shape[-1], device=V.device) >= info[..., None] - 1)
        raised = (L.diagonal(dim1=-2, dim2=-1).square() < floor) | failed
    else:
        # On a GPU nothing is read back, so that a CUDA graph can hold this.
        L, pivots = _cholesky_by_columns(V, floor, bounded=V.is_cuda)
        if V.is_cuda:
            return L
        raised = pivots < floor
    if raised.any():  # tokens that coincide, or more tokens than features
        low = raised.any(-1)
        first = int(raised[low].int().argmax(-1).min()) if is_for_blas(V) else 0
        L = L.clone()
        L[low] = _cholesky_from(first, V[low], floor[low])
    return L


def _cholesky_from(first: int, V: Matrix, floor: Float[Tensor, "*batch m"]) -> Matrix:
    """The factor, if the pivots before `first` need not be raised. LAPACK does their columns, many times faster than a loop."""
    L, above = torch.zeros_like(V), V[..., :first, :first]
    L[..., :first, :first] = torch.linalg.cholesky_ex(above).L
    left = torch.linalg.solve_triangular(L[..., :first, :first], V[..., first:, :first].mT, upper=False).mT
    L[..., first:, :first] = left
    L[..., first:, first:] = _cholesky_by_columns(V[..., first:, first:] - left @ left.mT, floor[..., first:], bounded=True)[0]
    return L


def _cholesky_by_columns(V: Matrix, floor: Float[Tensor, "*batch m"], bounded: bool) -> tuple[Matrix, Float[Tensor, "*batch m"]]:
    """The factor, and its pivots before they were raised to the floor.

    `bounded`: no entry is larger than a positive semi-definite rest allows. Without it rounding errors over a raised pivot can grow from
    column to column without limit. It costs half as much again.
    """
    L, rest = torch.zeros_like(V), V.clone()
    for j in range(V.shape[-1]):
        scale = torch.maximum(rest[..., j, j], floor[..., j]).rsqrt_()
        column = rest[..., j:, j] * scale[..., None]
        if bounded:
            most = torch.maximum(rest.diagonal(dim1=-2, dim2=-1)[..., j:], floor[..., j:]).sqrt_()
            column = torch.minimum(torch.maximum(column, -most), most)
        L[..., j:, j] = column
        if j + 1 < V.shape[-1]:
            below = column[..., 1:]
            rest[..., j + 1 :, j + 1 :].addcmul_(below[..., :, None], below[..., None, :], value=-1.0)
    return L, rest.diagonal(dim1=-2, dim2=-1)


def eigen_factor(V: Matrix) -> Matrix:
    """A factor of the nearest positive semi-definite matrix to V; not finite where V is not finite."""
    finite = V.isfinite().all(-1).all(-1)[..., None, None]
    values, vectors = torch.linalg.eigh(torch.where(finite, V, 0.0))
    return torch.where(finite, vectors * values.clamp(min=0.0).sqrt()[..., None, :], torch.nan)


def scale_to_unit(V: Matrix) -> tuple[Matrix, Float[Tensor, "*batch m"]]:
    """V in units of the tokens' lengths, and the lengths: what is rounding for a long token may be the whole length of a short one."""
    length = V.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sqrt()
    length = torch.where(length > 0.0, length, 1.0)
    return V / length[..., :, None] / length[..., None, :], length


def narrow_factor(V: Matrix, n: int) -> Float[Tensor, "*batch m {n}"]:
    """Some L of n columns, fewer than tokens, with L Lᵀ = V up to eigenvalues beyond the n-th."""
    unit, length = scale_to_unit(V)
    return length[..., :, None] * eigen_factor(unit)[..., -n:]


@dataclass(frozen=True, eq=False)
class Point:
    """A covariance, given by its matrix or by a factor. The other one is computed on first use and cached."""

    matrix: Matrix | None = None
    root: Matrix | None = None
    """Lower triangular."""

    @cached_property
    def V(self) -> Matrix:
        if self.matrix is not None:
            return self.matrix
        assert self.root is not None
        return lower_gram(self.root)

    @cached_property
    def L(self) -> Matrix:
        return self.root if self.root is not None else factor(self.V)


def symmetrise(V: Matrix) -> Matrix:
    return V / 2 + V.mT / 2


def vech(V: Matrix) -> Float[Tensor, "*batch p"]:
    """The upper triangle, row by row: the order of the rows and columns of `Sigma`."""
    rows, columns = torch.triu_indices(V.shape[-1], V.shape[-1], device=V.device)
    return V[..., rows, columns]


def check_square(V: Tensor, name: str) -> None:
    if V.ndim < 2 or V.shape[-1] != V.shape[-2] or 0 in V.shape:
        raise ValueError(f"{name} must be square, [..., m, m], got shape {tuple(V.shape)}")
    check_floating(V, name)


def check_floating(x: Tensor, name: str) -> None:
    if not x.dtype.is_floating_point:
        raise ValueError(f"{name} must hold floating point numbers, got {x.dtype}")


def check_symmetric(V: Tensor, name: str) -> None:
    check_square(V, name)
    # The tolerance is that of float32 for float64 too: people convert X Xᵀ / n of float32 tokens to float64.
    skew = (V - V.mT).abs().amax((-2, -1))
    if (skew > 1e-6 * V.abs().amax((-2, -1))).any():
        raise ValueError(f"{name} must be symmetric, got entries that differ by {skew.max().item():.3g} across the diagonal")


def check_covariance(V: Tensor, name: str = "V0") -> None:
    """Raises a ValueError that names what is wrong with a matrix that should be a covariance."""
    check_square(V, name)
    if V.dtype not in (torch.float32, torch.float64):  # LAPACK has no others
        raise ValueError(f"{name} must be of torch.float32 or torch.float64, got {V.dtype}")
    if not V.isfinite().all():
        worst = V[~V.isfinite()][0].item()
        raise ValueError(f"{name} must be finite, got an entry {worst}")
    check_symmetric(V, name)
    least = torch.linalg.eigvalsh(symmetrise(V))[..., 0]
    if (least < -1e-6 * V.diagonal(dim1=-2, dim2=-1).abs().sum(-1)).any():
        raise ValueError(f"{name} must be positive semi-definite, got an eigenvalue {least.min().item():.3g}")
