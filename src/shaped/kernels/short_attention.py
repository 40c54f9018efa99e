"""Shaped or plain attention of short sequences, from the one product that computes queries, keys and values.

For a few hundred tokens or less, stock kernels and the passes around them take several times as long as reading the queries, keys and
values. Here it is one kernel forward and one backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shaped.kernels import packed_attention
from shaped.kernels.availability import assume_constant, can_launch, is_ampere_or_later
from shaped.kernels.gpu import launch
from shaped.kernels.packed_attention import MixingGains

LONGEST = 128  # tokens, and features of a head: the matrices of one head must fit into a multiprocessor
STAGES = 2  # chunks of features that are loaded ahead


def reference(
    qkv: Tensor,
    gamma1: Tensor | None,
    gamma2: Tensor | None,
    heads: int,
    scale: float,
    gain: Tensor | None = None,
    qk_eps: float | None = None,
) -> Tensor:
    """What `attention` and `attend` compute, in plain PyTorch."""
    shaping = (0.0, 0.0) if gamma1 is None or gamma2 is None else (gamma1, gamma2)
    out = packed_attention.reference(qkv, *shaping, heads, scale, qk_eps)
    return out if gain is None else gain * out


def fits(x: Tensor, D: int) -> bool:
    """Can the kernel take tokens like x, [batch, m, *], with heads of D features?"""
    return x.ndim == 3 and can_launch(x) and 0 < x.shape[1] <= LONGEST and D <= LONGEST and x.shape[0] > 0 and _is_allowed(x.device.index)


def attention(qkv: Tensor, gamma1: Tensor | None, gamma2: Tensor | None, heads: int, scale: float, qk_eps: float | None = None) -> Tensor:
    """The tokens, [batch, m, heads · D], from queries, keys and values in one tensor, [batch, m, 3 · heads · D].

    `gamma1` and `gamma2` are tensors of one entry each. Without them the attention is plain.
    `qk_eps`: QK-norm with this eps; each query and key is divided by its root mean square. None: without.
    """
    return forward_op(qkv.contiguous(), gamma1, gamma2, heads, scale, qk_eps)[0]


def attend(
    qkv: Tensor,
    gamma1: Tensor | None,
    gamma2: Tensor | None,
    heads: int,
    scale: float,
    gain: Tensor | None = None,
    qk_eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The tokens, times `gain`, and what the backward pass needs: `stats`, [rows, batch, heads, m].

    Its first row is the base-2 log-normalisers of the softmax.
    With QK-norm two rows follow: the inverse root mean squares of queries and of keys.
    """
    from shaped.kernels.gpu.short_attention import short_attention_kernel

    batch, m, D, sizes = _read_sizes(qkv, heads)
    out, stats = qkv.new_empty(batch, m, heads * D), _make_stats(qkv, heads, qk_eps)
    arguments = (qkv, out, stats, gamma1, gamma2, gain, scale, qk_eps, heads, m, D, *sizes)
    launch(short_attention_kernel, batch * heads, *arguments, on=qkv, **choose_launch_options(m))
    return out, stats


def attend_backward(
    do: Tensor,
    qkv: Tensor,
    stats: Tensor,
    gamma1: Tensor | None,
    gamma2: Tensor | None,
    heads: int,
    scale: float,
    dgamma1: Tensor | None = None,
    dgamma2: Tensor | None = None,
    gain: Tensor | None = None,
    dgain: Tensor | None = None,
    qk_eps: float | None = None,
) -> Tensor:
    """The gradient of qkv. `stats` is what `attend` returned.

    A gain's gradient is the sum of its terms, one a query. They are written to `dgamma1`, `dgamma2` and `dgain`, [batch · heads · m],
    where these are given.
    """
    from shaped.kernels.gpu.short_attention import short_attention_backward_kernel

    batch, m, D, sizes = _read_sizes(qkv, heads)
    dqkv = torch.empty_like(qkv)
    arguments = (do, qkv, stats, gamma1, gamma2, gain, dqkv, dgamma1, dgamma2, dgain, scale, qk_eps, heads, m, D, *sizes)
    launch(short_attention_backward_kernel, batch * heads, *arguments, on=qkv, **choose_launch_options(m))
    return dqkv


@dataclass(frozen=True)
class ShortAttention:
    """The attention of a fused block: short sequences, no mask, no gains of QK-norm. `LongAttention` has the same methods.

    Args:
        heads, scale: number of heads, factor of the logits.
        qk_eps: QK-norm with this eps; None: without.
    """

    heads: int
    scale: float
    qk_eps: float | None = None

    def reference(self, qkv: Tensor, gains: MixingGains[Tensor]) -> Tensor:
        """The tokens of `attend`, in plain PyTorch."""
        return reference(qkv, gains.gamma1, gains.gamma2, self.heads, self.scale, gains.gain, self.qk_eps)

    def attend(self, qkv: Tensor, gains: MixingGains[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The tokens, and what the backward pass needs beside qkv."""
        out, stats = attend(qkv, gains.gamma1, gains.gamma2, self.heads, self.scale, gains.gain, self.qk_eps)
        return out, (stats,)

    def attend_backward(
        self,
        do: Tensor,
        qkv: Tensor,
        saved: tuple[Tensor, ...],
        gains: MixingGains[Tensor],
        terms: MixingGains[Tensor | None],
    ) -> Tensor:
        """The gradient of qkv. Terms of the gains' gradients are written where tensors for them are given, `count_terms` of each."""
        (stats,) = saved
        others = terms.gamma1, terms.gamma2, gains.gain, terms.gain
        return attend_backward(do, qkv, stats, gains.gamma1, gains.gamma2, self.heads, self.scale, *others, self.qk_eps)

    def count_terms(self, qkv: Tensor) -> tuple[int, int]:
        """Terms of the gradients of gamma1, gamma2 and gain, one a query, and of QK-norm's gains, which it does not have."""
        batch, m, _ = qkv.shape
        return batch * self.heads * m, 0


def choose_launch_options(m: int) -> dict[str, Any]:
    """With 128 registers a thread, two programs fit on a multiprocessor. A matrix of 128 x 128 takes 64 of them."""
    return {"num_warps": 8, "maxnreg": 128} if round_to_tile(m) == 128 else {"num_warps": 4}


def round_to_tile(size: int) -> int:
    """The next power of 2, at least 16: the sizes that Triton's tiles and matrix products need."""
    return max(16, 1 << (size - 1).bit_length())


def _read_sizes(qkv: Tensor, heads: int) -> tuple[int, int, int, tuple[int, int, int]]:
    """batch, m, D, and the kernel's constants: rows of a tile, features of a chunk, stages."""
    batch, m, width = qkv.shape
    D = width // (3 * heads)
    return batch, m, D, (round_to_tile(m), min(32, round_to_tile(D)), STAGES)


def _make_stats(qkv: Tensor, heads: int, qk_eps: float | None) -> Tensor:
    """An empty tensor for the `stats` of `attend`."""
    batch, m, _ = qkv.shape
    return qkv.new_empty(1 if qk_eps is None else 3, batch, heads, m, dtype=torch.float32)


def _make_gain_terms(qkv: Tensor, stats: Tensor, gains: bool) -> Tensor:
    """An empty tensor for the terms of the gradients of gamma1 and gamma2, one a query; without terms if they are not learned."""
    return qkv.new_empty(2, stats[0].numel() if gains else 0, dtype=torch.float32)


SETTINGS = "Tensor? gamma1, Tensor? gamma2, int heads, float scale, float? qk_eps"
FORWARD = f"(Tensor qkv, {SETTINGS}) -> (Tensor, Tensor)"
BACKWARD = f"(Tensor do, Tensor qkv, Tensor stats, {SETTINGS}, bool gains) -> (Tensor, Tensor)"


@torch.library.custom_op("shaped::short_attention", mutates_args=(), device_types="cuda", schema=FORWARD)
def forward_op(qkv: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *others, qk_eps = arguments
    return attend(qkv, *others, qk_eps=qk_eps)


@forward_op.register_fake
def _(qkv: Tensor, gamma1: Any, gamma2: Any, heads: int, scale: float, qk_eps: float | None) -> tuple[Tensor, Tensor]:
    batch, m, width = qkv.shape
    return qkv.new_empty(batch, m, width // 3), _make_stats(qkv, heads, qk_eps)


@torch.library.custom_op("shaped::short_attention_backward", mutates_args=(), device_types="cuda", schema=BACKWARD)
def backward_op(do: Tensor, qkv: Tensor, stats: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *others, qk_eps, gains = arguments
    dgamma = _make_gain_terms(qkv, stats, gains)
    return attend_backward(do.contiguous(), qkv, stats, *others, *(dgamma if gains else ()), qk_eps=qk_eps), dgamma


@backward_op.register_fake
def _(do: Tensor, qkv: Tensor, stats: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(qkv), _make_gain_terms(qkv, stats, arguments[-1])


def _save(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    qkv, gamma1, gamma2, *ctx.settings = inputs
    ctx.save_for_backward(qkv, output[1], gamma1, gamma2)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor, _: None) -> tuple[Tensor | None, ...]:
    qkv, stats, gamma1, gamma2 = ctx.saved_tensors
    learned = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    dqkv, dgamma = backward_op(do, qkv, stats, gamma1, gamma2, *ctx.settings, learned)
    if not learned:
        return dqkv, None, None, None, None, None
    one, two = dgamma.sum(1)
    return dqkv, one.view_as(gamma1).to(gamma1.dtype), two.view_as(gamma2).to(gamma2.dtype), None, None, None


forward_op.register_autograd(_differentiate, setup_context=_save)


@assume_constant
def _is_allowed(device: int | None) -> bool:
    """Is the GPU recent enough, and has the user not asked for one of PyTorch's own kernels (`torch.nn.attention.sdpa_kernel`)?"""
    stock = torch.backends.cuda
    unrestricted = stock.flash_sdp_enabled() and stock.cudnn_sdp_enabled() and stock.mem_efficient_sdp_enabled()
    return unrestricted and is_ampere_or_later(device)
