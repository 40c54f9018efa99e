"""Identity and centring around the stock attention kernel, with one pass over memory forward and one backward, on GPUs with Triton.

Left to autograd, the values' gradients from the attention, the identity and the centring would each be written and then added. Here the
values pass a fork before the attention, and its output a join. The join's backward hands the output's gradient straight to the fork, whose
backward adds all that follows from it to the attention's own gradient.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gain = float | Tensor

TRITON = importlib.util.find_spec("triton") is not None


def fits(q: Tensor, v: Tensor, gamma1: Gain, gamma2: Gain) -> bool:
    """Whether the kernels take these: on a GPU, single or half precision, gains that are numbers or one for each head."""
    if not (TRITON and q.is_cuda) or torch.compiler.is_exporting() or torch._C._are_functorch_transforms_active():
        return False
    D = v.shape[-1]
    shapes = q.ndim == 4 and 16 <= D <= 256 and D & (D - 1) == 0
    return shapes and q.dtype in (torch.float32, torch.float16, torch.bfloat16) and all(_by_head(g, q.shape[1]) for g in (gamma1, gamma2))


def shaped(attend: Callable[[Tensor], Tensor], v: Tensor, heads: int, gamma1: Gain, gamma2: Gain, causal: bool) -> Tensor:
    """attend(v), which has `heads` heads, with identity and centring."""
    gains = (*_split(gamma1, heads, v), *_split(gamma2, heads, v))
    if not torch.is_grad_enabled():
        return correct(attend(v), v, v, *gains, causal, False, False)[0]
    values, token = Fork.apply(v, heads, *gains, causal)
    return Join.apply(attend(values), token, v.detach(), *(g.detach() if isinstance(g, Tensor) else g for g in gains), causal)


class Fork(torch.autograd.Function):
    """The values, for the attention, and a token without memory of its own, through which the gradient of the output comes back."""

    @staticmethod
    def forward(
        ctx: Any, v: Tensor, heads: int, gamma1: Tensor | None, weight1: float, gamma2: Tensor | None, weight2: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(v, gamma1, gamma2)
        ctx.settings = weight1, weight2, causal
        return v.view_as(v), v.new_empty(()).expand(v.shape[0], heads, v.shape[2], v.shape[3])

    @staticmethod
    def backward(ctx: Any, dv: Tensor, do: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        v, gamma1, gamma2 = ctx.saved_tensors
        weight1, weight2, causal = ctx.settings
        learned1, learned2 = ctx.needs_input_grad[2], ctx.needs_input_grad[4]
        dv, dgamma = correct(dv, do, v, gamma1, weight1, gamma2, weight2, causal, True, learned1 or learned2)
        dgamma1 = (weight1 * dgamma[:, 0]).to(gamma1.dtype) if learned1 else None
        dgamma2 = (weight2 * dgamma[:, 1]).to(gamma2.dtype) if learned2 else None
        return dv, None, dgamma1, None, dgamma2, None, None


class Join(torch.autograd.Function):
    """Plain attention, corrected. What follows from v and the gains is the fork's."""

    @staticmethod
    def forward(
        ctx: Any,
        plain: Tensor,
        token: Tensor,
        v: Tensor,
        gamma1: Tensor | None,
        weight1: float,
        gamma2: Tensor | None,
        weight2: float,
        causal: bool,
    ) -> Tensor:
        return correct(plain, v, v, gamma1, weight1, gamma2, weight2, causal, False, False)[0]

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return do, do, None, None, None, None, None, None


SCHEMA = (
    "(Tensor y, Tensor x, Tensor v, Tensor? gamma1, float weight1, Tensor? gamma2, float weight2, "
    "bool causal, bool transposed, bool learned) -> (Tensor, Tensor)"
)


@torch.library.custom_op("shaped::correct", mutates_args=(), device_types="cuda", schema=SCHEMA)
def correct(
    y: Tensor,
    x: Tensor,
    v: Tensor,
    gamma1: Tensor | None,
    weight1: float,
    gamma2: Tensor | None,
    weight2: float,
    causal: bool,
    transposed: bool,
    learned: bool,
) -> tuple[Tensor, Tensor]:
    r"""$y + \gamma_1 x - \gamma_2 R x$, where R takes the mean over the tokens that a token sees.

    Forward, y is plain attention and x = v. Transposed, y is the gradient of v, x that of the output, R is transposed, and heads that share
    a key head are summed. If learned, also the gradients of the gains, [heads, 2].
    """
    from shaped.nn import kernels

    out = torch.empty_like(y)
    dgamma = kernels.correct(y, out, x, v, gamma1, gamma2, weight1, weight2, causal, transposed, learned)
    return out, x.new_empty(0, dtype=torch.float32) if dgamma is None else dgamma


@correct.register_fake
def _(
    y: Tensor,
    x: Tensor,
    v: Tensor,
    gamma1: Tensor | None,
    weight1: float,
    gamma2: Tensor | None,
    weight2: float,
    causal: bool,
    transposed: bool,
    learned: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), x.new_empty((x.shape[1], 2) if learned else 0, dtype=torch.float32)


def _by_head(gamma: Gain, heads: int) -> bool:
    return not isinstance(gamma, Tensor) or gamma.numel() == 1 or (gamma.numel() == heads and gamma.ndim >= 3 and gamma.shape[-3] == heads)


def _split(gamma: Gain, heads: int, v: Tensor) -> tuple[Tensor | None, float]:
    """A gain as one entry for each head, if it is a tensor, and a number."""
    if not isinstance(gamma, Tensor):
        return None, float(gamma)
    return gamma.to(v.device).reshape(-1).expand(heads), 1.0
