r"""Products with Gaussian matrices that are never drawn, forward and backward, exactly in law.

The rows of X span a space with an orthonormal basis O: $X = F O$. A matrix W of standard normals is, in any such basis,

$$W = O^\top G + (I - O^\top O)\,G',$$

with independent standard normals G, [r, k], and G', [n, k]. Forward, $X W = F G$ needs G alone. All that follows depends on W through
this product, so G' stays independent of it. Backward, the gradient D of the product is multiplied by the transposed matrix,

$$D W^\top = (D G^\top)\,O + (D G'^\top)(I - O^\top O),$$

and $D G'^\top$ has, given D, the law of $C H$ with $C C^\top = D D^\top$ and m x n normals H. Where tokens coincide, F is singular, and
O has directions that no token has. This changes nothing: W is the same in any basis.

Several matrices may multiply the same X: the first terms add up, and so do the covariances $D D^\top$. So H is drawn once for each X.

Of queries and keys often only inner products count. Then their G, one above the other, may be rotated together: Bartlett's triangle of
2r columns has the law of 2r x n_k normals up to a rotation (`draw_pair`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from shaped.covariance import Matrix, eigen_factor
from shaped.randomness import Stream

Tokens = Float[Tensor, "batch m n"]
Normals = Float[Tensor, "batch r k"]
Draw = Callable[[Stream, Float[Tensor, "batch m r"]], Normals]


class Products:
    """The products of a pass through a network, and what its way back finds out about each matrix.

    With `independent` the way back has new matrices, $C H$ alone: the usual assumption, which is wrong.
    """

    def __init__(self, forward: Stream, backward: Stream, independent: bool = False):
        self.forward, self.backward, self.independent = forward, backward, independent
        self.squares: dict[str, Float[Tensor, " batch"]] = {}
        """By matrix, the squared norms of the gradients with respect to it."""
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def multiply(self, X: Tokens, name: str, draw: Draw) -> Float[Tensor, "batch m k"]:
        """X W for a new matrix W of standard normals, of which `draw` draws G."""
        if self._last is None or self._last[0] is not X:
            ticket, F = Basis.apply(X, self)
            self._last = X, ticket, F
        _, ticket, F = self._last
        return Product.apply(ticket, F, draw(self.forward, F), name, self)

    def share_basis(self, X: Tokens, ticket: Tensor, F: Tensor) -> None:
        """Products of this X have this basis."""
        self._last = X, ticket, F

    def go_back(self, X: Tokens, Y: Tokens, drawn: dict[str, Tensor], D: Tokens) -> tuple[Tokens, dict[str, Float[Tensor, " batch"]]]:
        """From the gradient D with respect to Y, computed from X, to that with respect to X and the squared norms of those of the matrices.

        `drawn` are matrices with all their entries, by name.
        """
        D, *others = torch.autograd.grad(Y, [X, *drawn.values()], D)
        squares = self.squares | {name: G.square().sum((-2, -1)) for name, G in zip(drawn, others, strict=True)}
        self.squares = {}
        return D, squares

    def forget(self) -> None:
        """Forgets the last X. No later product has it."""
        self._last = None


class Basis(torch.autograd.Function):
    """X to (ticket, F). The ticket is zero; on the way back it carries [D Gᵀ, D Dᵀ], summed over the products of X."""

    @staticmethod
    def forward(ctx: Any, X: Tokens, products: Products) -> tuple[Tensor, Tensor]:
        F, O = find_basis(X)
        ctx.products = products
        ctx.save_for_backward(O)
        ctx.mark_non_differentiable(F)
        return X.new_zeros(*F.shape[:-1], F.shape[-1] + X.shape[-2]), F

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        carried, _ = gradients
        (O,), products = ctx.saved_tensors, ctx.products
        along, covariance = carried.split([O.shape[-2], carried.shape[-2]], -1)
        C = find_root(covariance)
        if O.shape[-2] == O.shape[-1] and not products.independent:  # X determines the matrices
            return along @ O, None
        fresh = torch.bmm(C, products.backward.normal(len(C), C.shape[-1], O.shape[-1]))
        return fresh if products.independent else fresh.baddbmm_(along - torch.bmm(fresh, O.mT), O), None


class Product(torch.autograd.Function):
    """F G, the product of F's tokens with a matrix."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, F: Tensor, G: Tensor, name: str, products: Products) -> Tensor:
        ctx.name, ctx.products = name, products
        ctx.save_for_backward(F, G)
        return torch.bmm(F, G)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (D,) = gradients
        F, G = ctx.saved_tensors
        # The norm of Xᵀ D = Oᵀ Fᵀ D. The trace of X Xᵀ D Dᵀ would lose half of the digits where the tokens are alike.
        ctx.products.squares[ctx.name] = torch.bmm(F.mT, D).square_().sum((-2, -1))
        return torch.cat([torch.bmm(D, G.mT), torch.bmm(D, D.mT)], -1), None, None, None, None


def find_basis(X: Tokens) -> tuple[Float[Tensor, "batch m r"], Float[Tensor, "batch r n"]]:
    """F and O with X = F O and orthonormal rows of O; r is the smaller one of m and n.

    From Cholesky's factor of X Xᵀ, and by Householder's reflections for those samples whose tokens are almost linearly dependent.
    """
    if X.shape[-2] > X.shape[-1]:
        return find_basis_by_reflections(X)
    F, alike = try_cholesky(torch.bmm(X, X.mT))
    eye, some = torch.eye(X.shape[-2], dtype=X.dtype, device=X.device), bool(alike.any())
    if some:
        F[alike] = eye
    O = torch.bmm(torch.linalg.solve_triangular(F, eye, upper=False), X)
    if some:
        F[alike], O[alike] = find_basis_by_reflections(X[alike])
    return F, O


def find_basis_by_reflections(X: Tokens) -> tuple[Tensor, Tensor]:
    """The same for any X, also of zeros."""
    Q, R = torch.linalg.qr(X.mT)
    return R.mT, Q.mT


def find_root(K: Float[Tensor, "batch m m"]) -> Float[Tensor, "batch m m"]:
    """C with C Cᵀ = K, for a K of any rank: a loss of few outputs has gradients D of low rank, for which Cholesky's algorithm may fail."""
    C, info = torch.linalg.cholesky_ex(K)
    failed = info > 0
    if failed.any():
        C[failed] = find_root_of_singular(K[failed])
    return C


def find_root_of_singular(K: Float[Tensor, "batch m m"]) -> Float[Tensor, "batch m m"]:
    """Cholesky's factor, with a ridge of the size of the rounding errors.

    Whether the algorithm fails depends on how the processor rounds. This root is near the one that it finds where it does not, so that
    a seed gives the same networks on every processor. A root by eigenvectors would be another one.
    """
    length = K.diagonal(dim1=-2, dim2=-1).sqrt()[..., None]
    inverse = torch.where(length > 0.0, 1.0 / length, 0.0)
    K = K * inverse * inverse.mT
    m = K.shape[-1]
    ridge = 4 * m * torch.finfo(K.dtype).eps * torch.eye(m, dtype=K.dtype, device=K.device)
    C, info = torch.linalg.cholesky_ex(K + ridge)
    if (failed := info > 0).any():
        C[failed] = eigen_factor(K[failed])
    return length * C


def try_cholesky(K: Matrix) -> tuple[Matrix, Bool[Tensor, "*batch"]]:
    """Cholesky's factor, and where it is not to be used, because rows are almost linearly dependent."""
    L, info = torch.linalg.cholesky_ex(K)
    least = torch.finfo(K.dtype).eps ** (1 / 3)  # then rows divided by L are orthonormal up to eps^(2/3)
    return L, (info > 0) | ~(L.diagonal(dim1=-2, dim2=-1).square() > least * K.diagonal(dim1=-2, dim2=-1)).all(-1)


def draw_normals(stream: Stream, F: Float[Tensor, "batch m r"], columns: int) -> Normals:
    """G for a matrix of so many columns."""
    return stream.normal(len(F), F.shape[-1], columns)


def draw_pair(stream: Stream, F: Float[Tensor, "batch m r"], heads: int, width: int) -> tuple[Normals, Normals]:
    """G for queries and for keys of which only the inner products within each head count: min(2r, width) columns a head."""
    batch, _, r = F.shape
    T = stream.bartlett(F.new_empty(batch * heads, 1, 1), 2 * r, width).unflatten(0, (batch, heads))
    query, key = T.transpose(1, 2).flatten(2).split(r, 1)
    return query.contiguous(), key.contiguous()
