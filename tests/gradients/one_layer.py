"""One layer, forward and back, for a gradient behind it with given R = D Dᵀ and C = D X'ᵀ: many draws, and means with little noise."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

import shaped
from shaped.covariance import factor, vech
from shaped.gradients.network import WeightlessLayer
from shaped.gradients.products import Draw, Products, find_basis
from shaped.layers import Sizes
from shaped.randomness import Stream
from shaped.testing.stats import seed


class Signs(NamedTuple):
    """The signs of what is drawn, in each copy of a sample."""

    value: Tensor
    query: Tensor
    rest: Tensor
    """Of the part of all matrices that only the way back sees."""

    @property
    def gradient(self) -> Tensor:
        """Of D across X'. Then in a mean over the copies all that is odd in one or in two of the four drops out."""
        return self.value * self.query * self.rest

    def make_copies(self, drawn: Tensor, signs: Tensor) -> Tensor:
        return (signs[:, None, None, None] * drawn).flatten(0, 1)


PLAIN = Signs(*torch.ones(3, 1, dtype=torch.float64))
MIRRORED = Signs(*torch.cartesian_prod(*torch.tensor([[1.0, -1.0]] * 3, dtype=torch.float64)).T)


class MirroredStream(Stream):
    """Normals for the way back. With mirrored copies their rows are orthogonal, of length sqrt(n), which keeps their mean square."""

    signs = PLAIN
    last: Tensor | None = None

    def normal(self, *shape: int) -> Tensor:
        H = super().normal(shape[0] // len(self.signs.rest), *shape[1:])
        if self.signs is MIRRORED:
            H = find_basis(H)[1] * math.sqrt(shape[-1])
        self.last = self.signs.make_copies(H, self.signs.rest)
        return self.last.clone()


class MirroredProducts(Products):
    def __init__(self, forward: Stream, backward: Stream, signs: Signs):
        super().__init__(forward, backward)
        self.signs, self.drawn = signs, dict[str, Tensor]()

    def multiply(self, X: Tensor, name: str, draw: Draw) -> Tensor:
        signs = {"value": self.signs.value, "query": self.signs.query, "key": torch.ones_like(self.signs.value)}[name]

        def draw_copies(stream: Stream, F: Tensor) -> Tensor:
            return self.signs.make_copies(draw(stream, F[: len(F) // len(signs)]), signs)

        product = super().multiply(X, name, draw_copies)
        self.drawn[name] = product.detach()
        return product


class Changes(NamedTuple):
    """n times the change of V (forward), R and C (backward) in one layer, [copy, sample, m, m]."""

    V: Tensor
    R: Tensor
    C: Tensor
    N: Tensor
    """sqrt(n) times the logits of the first copy. [sample, m, m]"""
    Xi: Tensor
    """The overlap of D with what X has across X', divided by gamma, in the first copy. [sample, m, m]"""
    controls: Tensor
    """Of mean 0. [sample, control]"""

    def average(self, changes: Tensor) -> Tensor:
        """Over the copies, less what the controls explain. [sample, m, m]"""
        rows = changes.mean(0).flatten(1)
        slopes = torch.linalg.lstsq(self.controls - self.controls.mean(0), rows - rows.mean(0), driver="gelsd").solution
        return (rows - self.controls @ slopes).view_as(changes[0])


def draw_changes(
    layer: shaped.ShapedAttention, V: Tensor, R: Tensor, C: Tensor, n: int, samples: int, number: int, signs: Signs = PLAIN
) -> Changes:
    m, copies, how = len(V), len(signs.value), {"dtype": V.dtype, "device": V.device}
    forward, other = (Stream(seed(number), 0, kind=kind, **how) for kind in ("forward", "other"))
    backward = MirroredStream(seed(number), 0, kind="backward", **how)
    backward.signs = signs
    products = MirroredProducts(forward, backward, signs)
    X = torch.zeros(copies * samples, m, n, dtype=V.dtype)
    X[..., :m] = factor(V) * math.sqrt(n)
    Y, _ = WeightlessLayer(layer, Sizes(n), V[None]).run(X.requires_grad_(), products)
    X0, Y0 = X.detach(), Y.detach()
    # D with D Dᵀ = R and D Yᵀ = C, uniform among them
    O, inverse = find_basis(Y0)[1], torch.linalg.inv(Y0 @ Y0.mT)
    normals = signs.make_copies(other.normal(samples, m, n), signs.gradient)
    across = find_basis(normals - normals @ O.mT @ O)[1]
    root = factor(R - C @ inverse @ C.T)
    D = C @ inverse @ Y0 + root @ across
    (before,) = torch.autograd.grad(Y, X, D)
    # Squares whose mean is known, given X and Y: of the overlaps of X with D, of the logits, of the rest of the matrices along X.
    part, eye = X0 - X0 @ O.mT @ O, torch.eye(m, dtype=V.dtype)
    overlaps = square(across @ part.mT) - torch.kron(eye, part @ part.mT / (n - m))
    logits = products.drawn["query"] @ products.drawn["key"].mT / (layer.tau(n, n) * math.sqrt(n))
    assert backward.last is not None
    controls = (overlaps, square(logits) - torch.kron(V, V) / layer.tau0**2, square(backward.last[..., :m]) - torch.kron(eye, eye))
    change_V, change_R, change_C = (
        change.unflatten(0, (copies, samples)) for change in (Y0 @ Y0.mT - n * V, n * (before @ before.mT - R), n * (before @ X0.mT - C))
    )
    overlap = (root @ across @ part.mT)[:samples] / layer.gamma
    means = torch.cat([vech(control).unflatten(0, (copies, samples)).mean(0) for control in controls], -1)
    return Changes(change_V, change_R, change_C, logits[:samples], overlap, means)


def square(matrices: Tensor) -> Tensor:
    """The products of all pairs of entries of each matrix. [sample, m·m, m·m]"""
    rows = matrices.flatten(1)
    return rows[:, :, None] * rows[:, None]
