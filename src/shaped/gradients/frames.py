r"""Tokens in few coordinates: the cost of a layer that commutes with rotations does not depend on its width n.

Let a layer be $Y = \lambda X + \gamma\,B W$, where B depends on X through products with Gaussian matrices alone, and so W, [k, n], is the
only matrix that makes features. Rotate X, and the law of Y rotates with it. So only inner products count, and each layer may choose its own
orthonormal basis of the n features. In this basis, its frame,

- X has m coordinates: L;
- the product needs m more. Of $F G$ with m x n normals G the last n - m columns may be rotated, so that they are Bartlett's triangle
  T (`Stream.bartlett`);
- the gradient with respect to Y has a part outside of both. It gets the last 2m coordinates.

So $X = [L, 0, 0]$ and $G = [G_1, T, 0]$ with m, m and 2m columns.

Backward, a frame is left for that of the layer before, in which Y has the basis O. Let the gradient with respect to Y, without the share
of the next matrices, be $a\,O + E$, where E is across Y. The layers behind saw Y only, and a rotation that keeps Y keeps their law. Thus,
given $E E^\top = R R^\top$, $E = R\,U$ with m uniform orthonormal rows across Y: $U = S^{-1} N$ for normals N with $N N^\top = S S^\top$.
The share of the next matrices across Y is $C N'$ with other normals N' (`shaped.gradients.products`). Of both N and N' the columns in the
frame are drawn, and one triangle for all others.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from shaped.covariance import factor
from shaped.gradients.products import Normals, Products, find_basis, find_root
from shaped.randomness import Stream

Framed = Float[Tensor, "batch m coordinates"]


def fits_frame(m: int, n: int) -> bool:
    """Are there 4m coordinates?"""
    return n >= 4 * m


def make_start(V0: Float[Tensor, "batch m m"], n: int) -> Framed:
    """Tokens of n features with covariance V0, in a frame."""
    L = math.sqrt(n) * factor(V0).contiguous()
    return torch.cat([L, L.new_zeros(*L.shape[:-1], 3 * L.shape[-1])], -1)


def enter_frame(Y: Framed, n: int, products: Products) -> Framed:
    """The same tokens of n features in a frame of their own, for which `products` need no other basis."""
    X, ticket, F = Frame.apply(Y, n, products)
    products.share_basis(X, ticket, F)
    return X


def draw_in_frame(stream: Stream, F: Float[Tensor, "batch m r"], n: int) -> Normals:
    """G for a matrix of n columns whose product joins tokens in their frame: [G1, T, 0]."""
    batch, m, r = F.shape
    return torch.cat([stream.normal(batch, r, m), stream.bartlett(F, r, n - m), F.new_zeros(batch, r, 2 * m)], -1)


class Frame(torch.autograd.Function):
    """Y to (X, ticket, F): the tokens in their new frame, and their basis for the products with them, as in `products.Basis`."""

    @staticmethod
    def forward(ctx: Any, Y: Framed, n: int, products: Products) -> tuple[Tensor, Tensor, Tensor]:
        m = Y.shape[-2]
        F, O = find_basis(Y[..., : 2 * m])
        ctx.n, ctx.products = n, products
        ctx.save_for_backward(O)
        ctx.mark_non_differentiable(F)
        zeros = F.new_zeros(*F.shape[:-1], 3 * m)
        return torch.cat([F, zeros], -1), zeros[..., : 2 * m], F

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        D, carried, _ = gradients
        (O,), n, products, m = ctx.saved_tensors, ctx.n, ctx.products, D.shape[-2]
        stream: Stream = products.backward
        along, covariance = carried.split(m, -1)
        C = find_root(covariance)
        along = D[..., :m] + (C @ stream.normal(*C.shape) if products.independent else along)
        E = D[..., m:]
        N = stream.normal(len(D), 2 * m, 2 * m)
        N = torch.cat([torch.baddbmm(N, torch.bmm(N, O.mT), O, alpha=-1.0), stream.bartlett(D, 2 * m, n - 2 * m)], -1)
        S = torch.linalg.cholesky_ex(torch.bmm(N[:, :m], N[:, :m].mT)).L
        R = torch.linalg.solve_triangular(S, find_root(torch.bmm(E, E.mT)), upper=False, left=False)
        found = torch.bmm(torch.cat([R, C], -1), N)
        found[..., : 2 * m].baddbmm_(along, O)
        return found, None, None
