"""A shaped Transformer block, forward and backward, as one autograd function on tensors.

A compiler adds gradients in separate passes. Here a matrix product adds its result to the gradient that is already there. A compiler also
makes everything wait for the gradients of the weights. Here they are computed on a side stream, because nothing needs them before the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shaped.kernels import relu_matmul, relu_matmul_hopper, residual
from shaped.kernels.long_attention import LongAttention
from shaped.kernels.packed_attention import MixingGains
from shaped.kernels.short_attention import ShortAttention
from shaped.kernels.side_stream import SideStream

T = TypeVar("T")


class Gains(NamedTuple, Generic[T]):
    """Something for each gain of a block: its value, its gradient, whether it is learned. `query` and `key` are those of QK-norm."""

    lam_attention: T
    gamma_attention: T
    gamma1: T
    gamma2: T
    lam_feedforward: T
    gamma_feedforward: T
    slope: T
    query: T | None = None
    key: T | None = None

    @property
    def mixing(self) -> MixingGains[T]:
        return MixingGains(self.gamma1, self.gamma2, self.gamma_attention, self.query, self.key)


# The kernels that compute the terms of each gain's gradient: over tokens, over hidden features, over queries, over queries and keys.
SOURCES = {
    "tokens": ("lam_attention", "lam_feedforward"),
    "hidden": ("gamma_feedforward", "slope"),
    "queries": ("gamma_attention", "gamma1", "gamma2"),  # or blocks of them
    "queries and keys": ("query", "key"),
}
SHAPING = ("gamma1", "gamma2", "slope")  # learned all three or none
QK = SOURCES["queries and keys"]  # both or none


class Matrix(NamedTuple):
    """A weight, [outputs, inputs], and the tensor that its gradient is written to."""

    weight: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Block:
    """Everything of a block but its gains.

    Args:
        qkv, output: matrices of the attention; `qkv` gives queries, keys and values in one product.
        pre, post: matrices of the feed-forward branch.
        attention: what mixes the tokens, between the two.
        side_stream: the same for all blocks of a model.
        last: is its backward pass the last one of the model?
    """

    qkv: Matrix
    output: Matrix
    pre: Matrix
    post: Matrix
    attention: ShortAttention | LongAttention
    side_stream: SideStream
    last: bool


def reference(x: Tensor, places: Tensor | None, block: Block, *gains: Tensor | None) -> Tensor:
    """What `BlockFunction` computes (Eq. shaped_transformer), in plain PyTorch with autograd. It writes no gradients of weights."""
    own = _name(gains)
    qkv = x @ block.qkv.weight.mT
    mixed = block.attention.reference(qkv, own.mixing)  # times gamma
    x = residual.reference(x, mixed @ block.output.weight.mT, own.lam_attention, None)
    if places is not None:
        x = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
    branch = relu_matmul.reference(x, block.pre.weight, own.slope) @ block.post.weight.mT
    return residual.reference(x, branch, own.lam_feedforward, own.gamma_feedforward)


def choose_relu_matmul(x: Tensor, weight: Tensor) -> Any:
    """The module whose `matmul_relu` and `matmul_relu_backward` are faster for these."""
    return relu_matmul_hopper if relu_matmul_hopper.fits(x, weight) else relu_matmul


class BlockFunction(torch.autograd.Function):
    """Eq. shaped_transformer. `places`, [batch, k]: only these tokens leave the attention; all of them if it is None.

    The gradients of the weights are not returned: they are written to `block.*.gradient`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor | None, block: Block, *gains: Tensor | None) -> Tensor:
        own, learned = _name(gains), _read_learned(ctx)
        x = x.contiguous()
        rows = x.flatten(0, -2)
        qkv = torch.mm(rows, block.qkv.weight.t()).unflatten(0, x.shape[:-1])
        mixed, saved = block.attention.attend(qkv, own.mixing)
        mixed, tokens, kept = mixed.flatten(0, -2), rows, None
        if places is not None:
            kept = (places + x.shape[1] * torch.arange(len(x), device=x.device)[:, None]).flatten()
            mixed, tokens = mixed.index_select(0, kept), rows.index_select(0, kept)
        middle = residual.add_branch(tokens, torch.mm(mixed, block.output.weight.t()), own.lam_attention, None)
        relu = choose_relu_matmul(middle, block.pre.weight)
        activated, hidden = relu.matmul_relu(middle, block.pre.weight, own.slope, keep_hidden=learned.slope)
        branch = torch.mm(activated, block.post.weight.t())
        ctx.block = block
        ctx.save_for_backward(rows, qkv, kept, mixed, tokens, middle, hidden, activated, *gains, *saved)
        return residual.add_branch(middle, branch, own.lam_feedforward, own.gamma_feedforward).unflatten(0, (len(x), -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        block: Block = ctx.block
        side_stream = block.side_stream
        with side_stream.joined_on_error():
            rows, qkv, kept, mixed, tokens, middle, hidden, activated, *others = ctx.saved_tensors
            own, saved, learned = _name(others[: len(Gains._fields)]), tuple(others[len(Gains._fields) :]), _read_learned(ctx)
            relu = choose_relu_matmul(middle, block.pre.weight)
            counts = {"tokens": residual.count_programs(tokens), "hidden": relu.count_programs(hidden)}
            counts["queries"], counts["queries and keys"] = block.attention.count_terms(qkv)
            gain_terms = _allocate_terms(counts, own, learned, rows.device)
            terms = _by_gain({} if gain_terms is None else gain_terms.terms_of)

            # The feed-forward branch. dx is the gradient past the branch; the product that leaves the branch is added to it in place.
            g = dy.contiguous().flatten(0, -2)
            dx, dbranch = residual.add_branch_backward(g, middle, own.lam_feedforward, own.gamma_feedforward, terms.lam_feedforward)
            side_stream.write_weight_gradient(dbranch, activated, block.post.gradient)
            dhidden = relu.matmul_relu_backward(
                g, block.post.weight, hidden, not learned.slope, own.slope, own.gamma_feedforward, terms.gamma_feedforward, terms.slope
            )
            side_stream.write_weight_gradient(dhidden, middle, block.pre.gradient)
            dx.addmm_(dhidden, block.pre.weight)

            # The attention branch.
            g = dx
            dx, _ = residual.add_branch_backward(g, tokens, own.lam_attention, None, terms.lam_attention)
            side_stream.write_weight_gradient(g, mixed, block.output.gradient)
            dmixed = torch.mm(g, block.output.weight)
            if kept is not None:
                dx, dmixed = (torch.zeros_like(rows).index_add_(0, kept, part) for part in (dx, dmixed))
            dqkv = block.attention.attend_backward(dmixed, qkv, saved, own.mixing, terms.mixing).flatten(0, -2)
            side_stream.write_weight_gradient(dqkv, rows, block.qkv.gradient)
            dx.addmm_(dqkv, block.qkv.weight)

            if gain_terms is not None:
                side_stream.run(gain_terms.add_up, gain_terms.terms, gain_terms.sums)
            side_stream.end_block(block.last)
            return dx.unflatten(0, qkv.shape[:-1]), None, None, *_by_gain({} if gain_terms is None else gain_terms.sum_of)


def _name(gains: Sequence[Tensor | None]) -> Gains[Any]:
    return Gains(*gains)


def _read_learned(ctx: Any) -> Gains[bool]:
    _, _, _, *learned = ctx.needs_input_grad  # in the order of the arguments of `forward`
    return Gains(*learned)


def _allocate_terms(counts: dict[str, int], own: Gains[Any], learned: Gains[bool], device: torch.device) -> residual.GainTerms | None:
    """None if no gain is learned. Without a learned shaping, or learned gains of QK-norm, there are no rows for them.

    Those of lam and gamma are there in any case: the product of Hopper that computes the terms of the slope computes gamma's with them.
    """
    if not any(learned):
        return None
    absent = (() if learned.slope else SHAPING) + (() if learned.query else QK)
    entries = {source: {name: getattr(own, name).numel() for name in gains if name not in absent} for source, gains in SOURCES.items()}
    return residual.GainTerms([(entries[source], counts[source]) for source in SOURCES], device)


def _by_gain(tensors: dict[str, Tensor]) -> Gains[Tensor | None]:
    return Gains(*(tensors.get(name) for name in Gains._fields))
