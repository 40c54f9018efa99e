"""A layer's module with the law of its products in place of its weights."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shaped import engine
from shaped.gradients.frames import draw_in_frame, enter_frame, fits_frame, make_start
from shaped.gradients.products import Draw, Products, Tokens, draw_normals, draw_pair
from shaped.layers.base import Layer, Sizes
from shaped.nn.networks import RandomAttention, RandomFeedForward, Residual
from shaped.randomness import Stream

LEFT_OUT = ("branch", "branches", "weight")
"""Parts of a parameter's path that tell a reader nothing."""


class WeightlessLayer:
    """Runs `layer.module(n)` for many networks at once, each with weights of its own, of which only the products are drawn.

    A parameter of several rows is a matrix, used once, as `x @ W`. One of a single row, such as a bias, is drawn.
    """

    def __init__(self, layer: Layer, sizes: Sizes, like: Tensor, m: int | None = None):
        """Like `like` in dtype and device. Only m tokens of `draw_start` may be in frames; without m all tokens have n features."""
        with Unmade(), like.device:
            module = layer.module(sizes.n, sizes.n_k, dtype=like.dtype)
        self.layer, self.products = layer, None
        self.entries: dict[str, int] = {}
        """The number of entries of each matrix, by its name."""
        self._used: set[str] = set()
        self._vectors: list[tuple[nn.Module, str, str, int]] = []
        for name, path in name_parameters([path for path, _ in module.named_parameters()]).items():
            owner = module.get_submodule(path.rpartition(".")[0])
            attribute = path.rpartition(".")[2]
            weight = getattr(owner, attribute)
            if weight.ndim != 2 or weight.stride() != (0, 0):
                raise ValueError(
                    f"layer must draw its weights as matrices of torch.randn, and scale their products, got {path} of {layer!r}"
                )
            self.entries[name] = weight.numel()
            delattr(owner, attribute)
            if weight.shape[0] == 1:
                self._vectors.append((owner, attribute, name, weight.shape[1]))
            else:
                setattr(owner, attribute, DrawnMatrix(self, name, *weight.shape))
        for attention in module.modules():
            if isinstance(attention, RandomAttention) and attention.has_plain_logits:
                join_draws(attention)
        self.n = sizes.n
        parts = list(module) if type(module) is nn.Sequential else [module]
        self.framed = m is not None and fits_frame(m, sizes.n) and all(commutes_with_rotations(part) for part in parts)
        """Are tokens in frames (`shaped.gradients.frames`), and not in n features?"""
        if self.framed:
            module = nn.Sequential(*(InFrame(self, part) for part in parts))
        self.module = module.to(like.device)

    def draw_start(self, V0: Tensor, stream: Stream) -> Tokens:
        """Tokens with covariance V0."""
        return make_start(V0, self.n) if self.framed else engine.draw_start(V0, self.n, stream)

    def find_covariance(self, X: Tokens) -> Tensor:
        """V = X Xᵀ/n of tokens as this layer has them."""
        return X @ X.mT / self.n

    def read_out(self, X: Tokens, columns: int, products: Products) -> Tensor:
        r"""$X W/\sqrt{n}$ for a matrix of so many columns."""
        X = enter_frame(X, self.n, products) if self.framed else X
        outputs = products.multiply(X, "readout", partial(draw_normals, columns=columns)) / math.sqrt(self.n)
        products.forget()
        return outputs

    def run(self, X: Tokens, products: Products) -> tuple[Tokens, dict[str, Tensor]]:
        """The tokens after the layer, and the weights that were drawn, by name."""
        self.products = products
        self._used.clear()
        vectors: dict[str, Tensor] = {}
        for owner, attribute, name, columns in self._vectors:
            vectors[name] = products.forward.normal(len(X), 1, columns).requires_grad_()
            setattr(owner, attribute, vectors[name])
        try:
            Y = self.module(X)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"layer must use its matrices as x @ W and in no other way, got {self.layer!r} ({error})") from None
        finally:
            products.forget()
        return Y, vectors

    def multiply(self, X: Tensor, matrix: DrawnMatrix) -> Tensor:
        name, rows = matrix.name, matrix.shape[0]
        if name in self._used:
            raise ValueError(f"layer must use each matrix once, got {self.layer!r}, which uses {name} twice")
        if not self.framed and (X.ndim != 3 or X.shape[-1] != rows):
            raise ValueError(f"layer must multiply {name} by tokens [batch, m, {rows}], got {self.layer!r} and shape {tuple(X.shape)}")
        assert self.products is not None
        self._used.add(name)
        return self.products.multiply(X, name, matrix.draw)

    def count_bytes(self, X: Tokens, products: Products) -> int:
        """What the way back through this layer needs to keep, for these tokens."""
        kept: dict[int, Any] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            Y, _ = self.run(X, products)
        if Y.shape != X.shape or not Y.requires_grad:
            raise ValueError(f"layer must return tokens of the shape it got, {tuple(X.shape)}, got {self.layer!r}, with {tuple(Y.shape)}")
        keep(Y)
        return sum(storage.nbytes() for storage in kept.values())


class DrawnMatrix:
    """Stands for a matrix of standard normals in `x @ W`."""

    def __init__(self, layer: WeightlessLayer, name: str, rows: int, columns: int):
        self._layer, self.name, self.shape = layer, name, torch.Size((rows, columns))
        self.draw: Draw = partial(draw_normals, columns=columns)

    def __rmatmul__(self, X: Tensor) -> Tensor:
        return self._layer.multiply(X, self)


def join_draws(attention: RandomAttention) -> None:
    """Lets the two matrices be drawn together, in fewer columns. The query is the first one that the module multiplies."""
    query, key = (cast(Any, getattr(attention, name, None)) for name in ("query", "key"))
    if not (isinstance(query, DrawnMatrix) and isinstance(key, DrawnMatrix)):
        return  # tokens of one feature
    other: list[Tensor] = []

    def draw_query(stream: Stream, F: Tensor) -> Tensor:
        mine, its = draw_pair(stream, F, attention.heads, query.shape[1] // attention.heads)
        other[:] = [its]
        return mine

    query.draw, key.draw = draw_query, lambda stream, F: other.pop()


def commutes_with_rotations(module: nn.Module) -> bool:
    """Do rotated tokens give rotated tokens, in law? LayerNorm, for one, sums over features. Subclasses may compute something else."""
    return (
        type(module) is Residual
        and module.norm is None
        and type(module.branch) in (RandomAttention, RandomFeedForward)
        and module.branch.outlet is not None
    )


class InFrame(nn.Module):
    """A residual layer that computes in a frame of its own."""

    def __init__(self, layer: WeightlessLayer, residual: Any):
        super().__init__()
        self.residual, self._layer = residual, layer
        getattr(residual.branch, residual.branch.outlet).draw = partial(draw_in_frame, n=layer.n)

    def forward(self, Y: Tensor) -> Tensor:
        assert self._layer.products is not None
        return self.residual(enter_frame(Y, self._layer.n, self._layer.products))


class Unmade(TorchFunctionMode):
    """Within it `torch.randn` returns a tensor without memory and of strides 0. Anything but the tensor itself has other strides."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.randn:
            return func(*args, **(kwargs or {}))
        shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        return torch.empty((), device="meta", dtype=(kwargs or {}).get("dtype")).expand(shape)


def name_parameters(paths: list[str]) -> dict[str, str]:
    """A short name for each path, such as "query" for "0.branch.query"; the whole path where several would have the same name."""
    short = [".".join(part for part in path.split(".") if not part.isdigit() and part not in LEFT_OUT) for path in paths]
    return {name if name and short.count(name) == 1 else path: path for name, path in zip(short, paths, strict=True)}
