"""Plain attention in place of the stock kernels of a GPU, for tests of what stands around them."""

import torch
from torch import Tensor

from shaped.kernels import attention_correction


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, save: bool) -> tuple[Tensor, Tensor]:
    """`attention_correction.attend`. Its backward pass needs no normalisers."""
    return attention_correction.reference(q, k, v, 0.0, 0.0, scale, causal), q.new_empty(q.shape[:-1])


def attend_plainly_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, plain: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, ...]:
    one, two, three = (x.detach().float().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        out = attention_correction.reference(one, two, three, 0.0, 0.0, scale, causal)
    return tuple(x.to(q.dtype) for x in torch.autograd.grad(out, (one, two, three), do.float()))
