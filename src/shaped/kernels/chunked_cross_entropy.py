"""Vocabulary projection and cross-entropy, chunk by chunk over the tokens: the logits of all tokens are never in memory at once.

The forward pass computes the gradients too, while it has a chunk's logits: three products for each chunk, as with whole logits. The
backward pass only scales them. The gradient of the matrix is accumulated in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shaped.kernels.availability import can_launch
from shaped.kernels.gpu import launch

IGNORED = -100  # the label of a token that has no loss, as in torch.nn.functional.cross_entropy
LOGITS = 1 << 27  # entries of a chunk's logits, at most: 256 MiB in bfloat16
BLOCK = 4096  # entries of the vocabulary that a program of the kernel reads at a time


def reference(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """What `sum_cross_entropy` computes, in plain PyTorch, with all logits in memory."""
    logits = x @ weight.t()
    return torch.nn.functional.cross_entropy(_to_accumulator(logits), labels, ignore_index=IGNORED, reduction="sum")


def sum_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, gradient: Tensor | None = None, chunk: int | None = None) -> Tensor:
    """The sum over tokens of the cross-entropy of the logits x W', in nats. Labels of IGNORED have none.

    Args:
        x: tokens, [tokens, n].
        weight: W, [vocabulary, n].
        labels: [tokens].
        gradient: where the backward pass writes the gradient of W, instead of returning it to autograd. It does not accumulate there.
        chunk: tokens of a chunk; chosen by the vocabulary's size by default.
    """
    kind = x.device.type
    if gradient is not None:
        x = x.to(weight.dtype)  # as `DirectLinear` does
    elif torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        x, weight = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (x, weight))
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    chunk = choose_chunk(len(weight)) if chunk is None else chunk
    of_weight = wanted and (weight.requires_grad or gradient is not None)
    return cross_entropy_op(x.contiguous(), weight, labels, gradient, chunk, wanted, of_weight)[0]


def choose_chunk(vocab: int) -> int:
    """Tokens of a chunk: a power of 2, which suits the matrix products, and at least 128."""
    return 1 << max(7, (LOGITS // vocab).bit_length() - 1)


SCHEMA = "(Tensor x, Tensor weight, Tensor labels, Tensor? gradient, int chunk, bool dx, bool dweight) -> (Tensor, Tensor, Tensor)"


@torch.library.custom_op("shaped::chunked_cross_entropy", mutates_args=(), schema=SCHEMA)
def cross_entropy_op(x: Tensor, weight: Tensor, labels: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and the gradients of x and of the matrix, empty where they are not wanted."""
    _, chunk, wants_dx, wants_dweight = options
    accumulator = _to_accumulator(x.new_empty(0)).dtype
    total = x.new_zeros((), dtype=accumulator)
    dx = torch.empty_like(x) if wants_dx else x.new_empty(0)
    dweight = torch.zeros_like(weight, dtype=accumulator) if wants_dweight else x.new_empty(0)
    for start in range(0, len(x), chunk):
        part = slice(start, start + chunk)
        losses, dlogits = compare_logits(x[part] @ weight.t(), labels[part], wants_dx or wants_dweight)
        total += losses.sum()
        if wants_dx:
            torch.mm(dlogits, weight, out=dx[part])
        if wants_dweight:
            dweight += dlogits.t() @ x[part]
    return total, dx, dweight


@cross_entropy_op.register_fake
def _(x: Tensor, weight: Tensor, labels: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, wants_dx, wants_dweight = options
    accumulator = _to_accumulator(x.new_empty(0)).dtype
    dx = torch.empty_like(x) if wants_dx else x.new_empty(0)
    return x.new_empty((), dtype=accumulator), dx, torch.empty_like(weight, dtype=accumulator) if wants_dweight else x.new_empty(0)


def compare_logits(logits: Tensor, labels: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """Each token's loss and the gradient of its logits, softmax - one-hot label. On a GPU the gradient overwrites the logits."""
    if can_launch(logits):
        return compare_in_kernel(logits, labels, gradient)
    full, counts = _to_accumulator(logits), labels >= 0
    at = labels.clamp(min=0)[:, None]
    lse = full.logsumexp(-1, keepdim=True)
    losses = torch.where(counts, (lse - full.gather(-1, at)).squeeze(-1), 0.0)
    if not gradient:
        return losses, logits
    softmax = (full - lse).exp_().scatter_add_(-1, at, full.new_full(at.shape, -1.0))
    return losses, softmax.mul_(counts[:, None]).to(logits.dtype)


def compare_in_kernel(logits: Tensor, labels: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """`compare_logits` in one kernel, which reads the logits twice and writes them once."""
    from shaped.kernels.gpu.cross_entropy import cross_entropy_kernel

    losses = logits.new_empty(len(logits), dtype=torch.float32)
    launch(cross_entropy_kernel, len(logits), logits, labels, losses, logits.shape[1], gradient, BLOCK, on=logits, num_warps=8)
    return losses, logits


@torch.library.custom_op("shaped::write_scaled", mutates_args=("out",))
def write_scaled(x: Tensor, factor: Tensor, out: Tensor) -> None:
    out.copy_(x * factor)


def _save(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.gradient = inputs[3]  # not saved like the others: autograd refuses saved tensors that are written
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dloss: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    dx, dweight = ctx.saved_tensors
    if ctx.gradient is not None:
        write_scaled(dweight, dloss, ctx.gradient)
    # The factor is not cast to bfloat16: its rounding would be the same for all tokens.
    of_x = (_to_accumulator(dx) * dloss).to(dx.dtype) if ctx.needs_input_grad[0] else None
    of_weight = dweight * dloss if ctx.needs_input_grad[1] else None
    return of_x, of_weight, None, None, None, None, None


cross_entropy_op.register_autograd(_differentiate, setup_context=_save)


def _to_accumulator(x: Tensor) -> Tensor:
    """Losses are computed in float32 or, for float64 tokens, in float64."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
