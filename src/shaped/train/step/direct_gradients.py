"""Linear and embedding layers whose backward pass writes the weight's gradient in place, where the optimiser reads it.

Autograd would allocate the gradient and copy it there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from shaped.hf.models import Embedding
from shaped.nn.modules import ShapedSelfAttention


@torch.library.custom_op("shaped::weight_gradient", mutates_args=("gradient",))
def weight_gradient(dy: Tensor, x: Tensor, gradient: Tensor) -> None:
    torch.mm(dy.flatten(0, -2).t(), x.flatten(0, -2), out=gradient)


@torch.library.custom_op("shaped::product", mutates_args=())
def product(x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    return x @ weight.t()


@product.register_fake
def _(x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    return x @ weight.t()


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    x, weight, ctx.gradient = inputs  # not saved like the others: autograd refuses saved tensors that are written
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    x, weight = ctx.saved_tensors
    weight_gradient(dy, x, ctx.gradient)
    return dy @ weight, None, None


product.register_autograd(_gradients, setup_context=_keep)


class DirectLinear(nn.Module):
    """x W' like an `nn.Linear`, in the dtype of W. A backward pass overwrites the gradient and does not accumulate: one use a pass."""

    gradient: Tensor

    def __init__(self, weight: Tensor, gradient: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)  # autograd does not compute its gradient
        # `data` has its own version counter. With a shared one, autograd takes a write to one gradient for a write to the whole vector.
        self.register_buffer("gradient", gradient.data, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return product(x.to(self.weight.dtype), self.weight, self.gradient)


@torch.library.custom_op("shaped::table_gradient", mutates_args=("gradient",))
def table_gradient(dy: Tensor, ids: Tensor, gradient: Tensor) -> None:
    gradient.zero_().index_add_(0, ids.flatten(), dy.flatten(0, -2).to(gradient.dtype))


@torch.library.custom_op("shaped::rows_of_table", mutates_args=())
def rows_of_table(ids: Tensor, table: Tensor, gradient: Tensor, trained: Tensor) -> Tensor:
    return table[ids]


@rows_of_table.register_fake
def _(ids: Tensor, table: Tensor, gradient: Tensor, trained: Tensor) -> Tensor:
    return table.new_empty(*ids.shape, table.shape[1])


def _keep_ids(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
    ids, _, ctx.gradient, _ = inputs
    ctx.save_for_backward(ids)


def _gradient_of_table(ctx: Any, dy: Tensor) -> tuple[None, None, None, None]:
    table_gradient(dy, *ctx.saved_tensors, ctx.gradient)
    return None, None, None, None


rows_of_table.register_autograd(_gradient_of_table, setup_context=_keep_ids)


class DirectEmbedding(nn.Module):
    """Rows of a table like `nn.Embedding`, with the gradient written in place as by `DirectLinear`.

    Autograd runs the backward pass only if an input requires a gradient. `trained`, any parameter beside the table, is that input; it gets
    no gradient here.
    """

    gradient: Tensor

    def __init__(self, table: Tensor, gradient: Tensor, trained: nn.Parameter):
        super().__init__()
        self.weight = nn.Parameter(table, requires_grad=False)
        self.register_buffer("gradient", gradient.data, persistent=False)
        self._trained = (trained,)  # in a tuple, so that it is not registered as this module's parameter

    def forward(self, ids: Tensor) -> Tensor:
        return rows_of_table(ids, self.weight, self.gradient, *self._trained)


def install_direct_embeddings(model: nn.Module, weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> set[str]:
    """Replaces the tables of tokens and returns their names. A table that is also the output matrix stays.

    Only on a GPU: there, copying a gradient with a row for every token of the vocabulary takes longer than summing the batch's rows. And
    only if another parameter is left to autograd, which would else have nothing to differentiate.
    """
    found: dict[str, Any] = {f"{name}.tokens.weight": module for name, module in model.named_modules() if isinstance(module, Embedding)}
    for name, module in list(found.items()):
        uses = sum(getattr(other, "weight", None) is module.tokens.weight for other in model.modules())
        left = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter is not module.tokens.weight]
        if uses > 1 or not left or not gradients[name].is_cuda:
            del found[name]
        else:
            trained = left[0] if module.positions is None else module.positions.weight
            module.tokens = DirectEmbedding(weights[name], gradients[name], trained)
    return set(found)


def install_direct_linears(model: nn.Module, weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> set[str]:
    """Replaces the linear layers whose weights and gradients are given by name, and returns the weights' names.

    Weights that are used in several places are left to autograd. Queries, keys and values become one product where their weights are
    adjacent in memory.
    """
    places = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, nn.Linear)]
    uses = Counter(id(module.weight) for _, module in places)
    found = {f"{name}.weight": name for name, module in places if uses[id(module.weight)] == 1 and f"{name}.weight" in weights}
    for weight, name in found.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, DirectLinear(weights[weight], gradients[weight]))
    for name, module in model.named_modules():
        parts = [f"{name}.{part}.weight" for part in ("query", "key", "value")]
        if isinstance(module, ShapedSelfAttention) and all(part in found for part in parts):
            weight, gradient = (_join([tensors[part] for part in parts]) for tensors in (weights, gradients))
            if weight is not None and gradient is not None:
                module.join(DirectLinear(weight, gradient))
    return set(found)


def _join(matrices: list[Tensor]) -> Tensor | None:
    """A view of matrices that are adjacent in memory as one matrix; None if they are not adjacent."""
    place = matrices[0].storage_offset()
    for matrix in matrices:
        if matrix.untyped_storage().data_ptr() != matrices[0].untyped_storage().data_ptr() or matrix.storage_offset() != place:
            return None
        place += matrix.numel()
    return matrices[0].as_strided((sum(len(matrix) for matrix in matrices), matrices[0].shape[1]), matrices[0].stride())
