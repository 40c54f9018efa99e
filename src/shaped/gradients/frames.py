r"""Tokens in few coordinates: the cost of a layer that commutes with rotations does not depend on its width n.

Let a layer be $Y = \lambda X + \gamma\,B W$, where B depends on X through products with Gaussian matrices alone, and so W, [k, n], is the
only matrix that makes features. Rotate X, and the law of Y rotates with it. So only inner products count, and each layer may choose its own
orthonormal basis of the n features. In this basis, its frame,

- X has m coordinates: $X = [L, 0, 0]$;
- the product needs m more. Of $F G$ with m x n normals G the last n - m columns may be rotated, so that they are Bartlett's triangle
  (`Stream.bartlett`): $G = [G_1, T, 0]$;
- the gradient with respect to Y has a part outside of both, of rank m. It gets the last m coordinates.

Backward, a frame must be left for that of the layer before, in which Y has the basis O. Let the gradient with respect to Y be
$a\,O + E$, where E is across Y. All layers behind saw Y only, and their law is the same after any rotation that keeps Y. Thus, given
$E E^\top = R R^\top$, $E = R\,U$ with U uniform: m orthonormal rows across Y, $U = S^{-1} N$ for normals N with $N N^\top = S S^\top$. Of N, too,
only the columns in the frame are drawn, and a triangle for all others.
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
    """Are 3m coordinates fewer than n, so that a frame pays?"""
    return n >= 4 * m


def make_start(V0: Float[Tensor, "batch m m"], n: int) -> Framed:
    """Tokens of n features with covariance V0, in a frame."""
    L = math.sqrt(n) * factor(V0).contiguous()
    return torch.cat([L, L.new_zeros(*L.shape[:-1], 2 * L.shape[-1])], -1)


def enter_frame(Y: Framed, n: int, products: Products) -> Framed:
    """The same tokens of n features in a frame of their own, for which `products` need no other basis."""
    X, ticket, F = Frame.apply(Y, n, products)
    products.share_basis(X, ticket, F)
    return X


def draw_in_frame(stream: Stream, F: Float[Tensor, "batch m r"], n: int) -> Normals:
    """G for a matrix of n columns whose product joins tokens in their frame: [G1, T, 0]."""
    batch, m, r = F.shape
    return torch.cat([stream.normal(batch, r, m), stream.bartlett(F, r, n - m), F.new_zeros(batch, r, m)], -1)


class Frame(torch.autograd.Function):
    """Y to (X, ticket, F): the tokens in their new frame, and their basis for the products with them, as in `products.Basis`."""

    @staticmethod
    def forward(ctx: Any, Y: Framed, n: int, products: Products) -> tuple[Tensor, Tensor, Tensor]:
        m = Y.shape[-2]
        F, O = find_basis(Y[..., : 2 * m])
        ctx.n, ctx.products = n, products
        ctx.save_for_backward(O)
        ctx.mark_non_differentiable(F)
        X = torch.cat([F, F.new_zeros(*F.shape[:-1], 2 * m)], -1)
        return X, F.new_zeros(*F.shape[:-1], 2 * m), F

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        D, carried, _ = gradients
        (O,), n, products, m = ctx.saved_tensors, ctx.n, ctx.products, D.shape[-2]
        stream: Stream = products.backward
        # The matrices' share, as in `products.Basis`: new normals in 2m coordinates, and in all that no gradient has.
        along, covariance = carried.split(m, -1)
        C = find_root(covariance)
        if products.independent:
            along = C @ stream.normal(*C.shape)
        along = along + D[..., :m]
        E = torch.cat([torch.baddbmm(D[..., m:], C, stream.normal(len(C), m, 2 * m)), C @ stream.bartlett(C, m, n - 3 * m)], -1)
        # In the frame of Y: coordinates across it, and one triangle for all features outside.
        N = stream.normal(len(C), m, 2 * m)
        N = torch.baddbmm(N, N @ O.mT, O, alpha=-1.0)
        N = torch.cat([N, stream.bartlett(C, m, n - 2 * m)], -1)
        R = torch.linalg.solve_triangular(factor(N @ N.mT), find_root(E @ E.mT), upper=False, left=False)
        across = R @ N
        across[..., : 2 * m] += along @ O
        return across, None, None
