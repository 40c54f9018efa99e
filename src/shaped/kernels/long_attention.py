"""Shaped attention of long sequences, from the one product that computes queries, keys and values.

The stock kernel attends. Before it one pass normalises and rotates queries and keys; after it `attention_correction` adds identity and
centring. Backward, two passes write straight into the gradient of the one product: nothing is concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shaped.kernels import attention_correction, packed_attention
from shaped.kernels.availability import can_launch
from shaped.kernels.gpu import launch
from shaped.kernels.packed_attention import MixingGains

TOKENS = 64  # of a program


def count_warps(D: int) -> int:
    """Of a program that prepares queries and keys: with 4, rows of 256 features do not fit into the registers of an sm_80 GPU."""
    return 8 if D == 256 else 4


def fits(x: Tensor, D: int) -> bool:
    """Can the kernels take tokens like x, [batch, m, *], with heads of D features?"""
    shapes = x.ndim == 3 and x.shape[0] > 0 and x.shape[1] > 0 and D in attention_correction.FEATURES
    return shapes and can_launch(x) and attention_correction.has_flash(x.device.index)


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

    def reference(self, qkv: Tensor, gains: MixingGains[Tensor]) -> Tensor:
        """The tokens of `attend`, in plain PyTorch."""
        own = None if gains.query is None or gains.key is None else (gains.query, gains.key)
        settings = self.heads, self.scale, self.qk_eps, self.causal, self.rotation
        return gains.gain * packed_attention.reference(qkv, gains.gamma1, gains.gamma2, *settings, own)

    def attend(self, qkv: Tensor, gains: MixingGains[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The tokens, and for the backward pass: prepared queries and keys, plain attention, its log-normalisers."""
        q, k, v = self._split(qkv)
        prepared = qkv.new_empty(0)
        if self._prepares:
            prepared = self._prepare(qkv, gains)
            q, k = prepared.unbind(2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        plain, lse = attention_correction.attend(q, k, v, self.scale, self.causal, True)
        out = torch.empty(*qkv.shape[:2], self.heads, v.shape[-1], dtype=qkv.dtype, device=qkv.device)
        attention_correction.correct(plain, out.transpose(1, 2), v, v, *self._gammas(gains), self.causal, transposed=False, gain=gains.gain)
        return out.flatten(-2), (prepared, plain, lse)

    def attend_backward(
        self,
        do: Tensor,
        qkv: Tensor,
        saved: tuple[Tensor, ...],
        gains: MixingGains[Tensor],
        terms: MixingGains[Tensor | None],
    ) -> Tensor:
        """The gradient of qkv.

        Terms of the gains' gradients are written where tensors for them are given, `count_terms` of each entry. Those of QK-norm's gains
        are [D, at least so many].
        """
        from shaped.kernels.gpu.queries_keys import prepare_backward_kernel

        prepared, plain, lse = saved
        q, k, v = self._split(qkv)
        if self._prepares:
            q, k = prepared.unbind(2)
        q, k, v, do = (x.transpose(1, 2) for x in (q, k, v, do.view(v.shape)))
        dq, dk, dv = attention_correction.attend_backward(do, q, k, v, plain, lse, self.scale, self.causal)
        dqkv = torch.empty_like(qkv)
        dgamma = None if terms.gamma1 is None or terms.gamma2 is None else (terms.gamma1, terms.gamma2)
        into = self._split(dqkv)[2].transpose(1, 2)
        wanted = {"gain": gains.gain, "dgamma": dgamma, "dgain": terms.gain}
        attention_correction.correct(dv, into, do, v, *self._gammas(gains), self.causal, transposed=True, **wanted)
        dq, dk = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk))  # the pass below reads rows of features
        cos, sin, stride = self._read_rotation()
        strides = (*dq.stride()[:3], *dk.stride()[:3], stride, 0 if terms.query is None else terms.query.stride(0))
        vectors = gains.query, gains.key, terms.query, terms.key
        sizes = (self.heads, qkv.shape[1], v.shape[-1], TOKENS)
        arguments = (dq, dk, qkv, dqkv, cos, sin, gains.gain, *vectors, self.qk_eps, *strides, *sizes)
        launch(prepare_backward_kernel, self._count_programs(qkv), *arguments, on=qkv, num_warps=count_warps(v.shape[-1]))
        return dqkv

    def count_terms(self, qkv: Tensor) -> tuple[int, int]:
        """Terms of the gradients of gamma1, gamma2 and gain, and of each entry of QK-norm's gains."""
        batch, m, _ = qkv.shape
        return batch * self.heads * attention_correction.count_blocks(m), self._count_programs(qkv)

    def _gammas(self, gains: MixingGains[Tensor]) -> tuple[Tensor, Tensor, float, float]:
        """As `attention_correction.correct` takes them: one for each head, and factors."""
        return gains.gamma1.expand(self.heads), gains.gamma2.expand(self.heads), 1.0, 1.0

    @property
    def _prepares(self) -> bool:
        return self.qk_eps is not None or self.rotation is not None

    def _prepare(self, qkv: Tensor, gains: MixingGains[Tensor]) -> Tensor:
        """Queries and keys as the logits need them, [batch, m, 2, heads, D]."""
        from shaped.kernels.gpu.queries_keys import prepare_kernel

        batch, m, width = qkv.shape
        D = width // (3 * self.heads)
        out = qkv.new_empty(batch, m, 2, self.heads, D)
        cos, sin, stride = self._read_rotation()
        arguments = (qkv, out, cos, sin, gains.query, gains.key, self.qk_eps, stride, self.heads, m, D, TOKENS)
        launch(prepare_kernel, self._count_programs(qkv), *arguments, on=qkv, num_warps=count_warps(D))
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
