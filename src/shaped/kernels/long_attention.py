"""Shaped attention of long sequences, from the one product that computes queries, keys and values.

The stock kernel attends. Before it one pass normalises and rotates queries and keys; after it `attention_correction` adds identity and
centring. Backward, two passes write straight into the gradient of the one product: nothing is concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from shaped.kernels import attention_correction
from shaped.kernels.availability import can_launch
from shaped.kernels.gpu import launch

TOKENS = 64  # of a program


def fits(x: Tensor, D: int) -> bool:
    """Can the kernels take tokens like x, [batch, m, *], with heads of D features?"""
    shapes = x.ndim == 3 and x.shape[0] > 0 and x.shape[1] > 0 and D in attention_correction.FEATURES
    return shapes and can_launch(x) and attention_correction.has_flash(x.device.index)


def reference(
    qkv: Tensor,
    gamma1: Tensor | float,
    gamma2: Tensor | float,
    heads: int,
    scale: float,
    qk_eps: float | None = None,
    causal: bool = False,
    rotation: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Shaped attention of queries, keys and values in one tensor, [batch, m, 3 · heads · D], in plain PyTorch."""
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
    if qk_eps is not None:
        q, k = (rms_norm(x, x.shape[-1:], eps=qk_eps) for x in (q, k))
    if rotation is not None:
        q, k = (_rotate(x, *rotation) for x in (q, k))
    return attention_correction.reference(q, k, v, gamma1, gamma2, scale, causal).transpose(1, 2).flatten(-2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


@dataclass(frozen=True)
class LongAttention:
    """The attention of a fused block: any length, no mask or the causal one.

    Args:
        heads, scale: number of heads, factor of the logits.
        qk_eps: QK-norm with this eps; None: without.
        causal: a token attends to itself and those before it.
        rotation: cosines and sines of the tokens' angles, [batch or 1, m, D/2], in float32; None: queries and keys are not rotated.
    """

    heads: int
    scale: float
    qk_eps: float | None = None
    causal: bool = False
    rotation: tuple[Tensor, Tensor] | None = None

    def reference(self, qkv: Tensor, gamma1: Tensor, gamma2: Tensor) -> Tensor:
        return reference(qkv, gamma1, gamma2, self.heads, self.scale, self.qk_eps, self.causal, self.rotation)

    def attend(self, qkv: Tensor, gamma1: Tensor, gamma2: Tensor, gain: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The tokens, times `gain`, and for the backward pass: prepared queries and keys, plain attention, its log-normalisers."""
        q, k, v = self._split(qkv)
        prepared = qkv.new_empty(0)
        if self._prepares:
            prepared = self._prepare(qkv)
            q, k = prepared.unbind(2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        plain, lse = attention_correction.attend(q, k, v, self.scale, self.causal, True)
        out = torch.empty(*qkv.shape[:2], self.heads, v.shape[-1], dtype=qkv.dtype, device=qkv.device)
        gammas = gamma1.expand(self.heads), gamma2.expand(self.heads), 1.0, 1.0
        attention_correction.correct(plain, out.transpose(1, 2), v, v, *gammas, self.causal, transposed=False, gain=gain)
        return out.flatten(-2), (prepared, plain, lse)

    def attend_backward(
        self,
        do: Tensor,
        qkv: Tensor,
        saved: tuple[Tensor, ...],
        gamma1: Tensor,
        gamma2: Tensor,
        gain: Tensor,
        dgamma1: Tensor | None,
        dgamma2: Tensor | None,
        dgain: Tensor | None,
    ) -> Tensor:
        """The gradient of qkv. Terms of the gains' gradients are written where tensors for them are given, `count_terms` of each."""
        from shaped.kernels.gpu.queries_keys import prepare_backward_kernel

        prepared, plain, lse = saved
        q, k, v = self._split(qkv)
        if self._prepares:
            q, k = prepared.unbind(2)
        q, k, v, do = (x.transpose(1, 2) for x in (q, k, v, do.view(v.shape)))
        dq, dk, dv = attention_correction.attend_backward(do, q, k, v, plain, lse, self.scale, self.causal)
        dqkv = torch.empty_like(qkv)
        gammas = gamma1.expand(self.heads), gamma2.expand(self.heads), 1.0, 1.0
        dgamma = None if dgamma1 is None or dgamma2 is None else (dgamma1, dgamma2)
        into = self._split(dqkv)[2].transpose(1, 2)
        attention_correction.correct(dv, into, do, v, *gammas, self.causal, transposed=True, gain=gain, dgamma=dgamma, dgain=dgain)
        dq, dk = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk))  # the pass below reads rows of features
        cos, sin, stride = self._read_rotation()
        strides = (*dq.stride()[:3], *dk.stride()[:3], stride)
        sizes = (self.heads, qkv.shape[1], v.shape[-1], TOKENS)
        arguments = (dq, dk, qkv, dqkv, cos, sin, gain, self.qk_eps, *strides, *sizes)
        launch(prepare_backward_kernel, self._count_programs(qkv), *arguments, on=qkv, num_warps=4)
        return dqkv

    def count_terms(self, qkv: Tensor) -> int:
        """Terms of a gain's gradient."""
        batch, m, _ = qkv.shape
        return batch * self.heads * attention_correction.count_blocks(m)

    @property
    def _prepares(self) -> bool:
        return self.qk_eps is not None or self.rotation is not None

    def _prepare(self, qkv: Tensor) -> Tensor:
        """Queries and keys as the logits need them, [batch, m, 2, heads, D]."""
        from shaped.kernels.gpu.queries_keys import prepare_kernel

        batch, m, width = qkv.shape
        D = width // (3 * self.heads)
        out = qkv.new_empty(batch, m, 2, self.heads, D)
        cos, sin, stride = self._read_rotation()
        arguments = (qkv, out, cos, sin, self.qk_eps, stride, self.heads, m, D, TOKENS)
        launch(prepare_kernel, self._count_programs(qkv), *arguments, on=qkv, num_warps=4)
        return out

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of queries, keys and values, each [batch, m, heads, D]."""
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(2)
        return q, k, v

    def _read_rotation(self) -> tuple[Tensor | None, Tensor | None, int]:
        """Cosines, sines, and the distance between sequences in both: 0 if all sequences share them."""
        if self.rotation is None:
            return None, None, 0
        cos, sin = (table.contiguous() for table in self.rotation)
        return cos, sin, cos.stride(0) if len(cos) > 1 else 0

    def _count_programs(self, qkv: Tensor) -> int:
        batch, m, _ = qkv.shape
        return batch * self.heads * -(-m // TOKENS)
