"""The formulas that both a step of a random network and a trainable module compute."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from shaped.nn.attention import shaped_attention as shaped_attention


def logit_bias(mask: str | Tensor | None, m: int, like: Tensor) -> Float[Tensor, "*heads m m"]:
    """B for m tokens, with -inf where a token is not attended to: zeros, the "causal" mask, or the bias given, [m, m] or [heads, m, m]."""
    if isinstance(mask, Tensor):
        if mask.shape[-2:] != (m, m):
            raise ValueError(f"mask must be {m} x {m} for {m} tokens, got {' x '.join(map(str, mask.shape))}")
        return mask.to(like)
    B = like.new_zeros(m, m)
    return B if mask is None else B.masked_fill_(torch.ones_like(B, dtype=torch.bool).triu_(1), -torch.inf)


def attention_matrix(
    logits: Float[Tensor, "*batch m k"],
    bias: Float[Tensor, "*#batch m k"],
    gamma1: float | Tensor = 1.0,
    gamma2: float | Tensor = 1.0,
) -> Float[Tensor, "*batch m k"]:
    r"""$A = \gamma_1 I + \text{softmax}(Y + B) - \gamma_2\,\text{softmax}(B)$ (Eq. shaped-attention, Eq. shaped-attention-train).

    The bias B holds -inf where a token is not attended to; softmax(B), the attention at zero logits, is $11^\top/m$ without a mask.
    """
    A = torch.softmax(logits + bias, -1) - gamma2 * torch.softmax(bias, -1)
    A.diagonal(dim1=-2, dim2=-1).add_(gamma1)
    return A


def shaped_relu(x: Tensor, negative_slope: float | Tensor, positive_slope: float | Tensor = 1.0) -> Tensor:
    r"""$\sigma_s(x) = s_+ \max(x, 0) + s_- \min(x, 0)$ (Eq. resnet), in the precision of x."""
    if isinstance(negative_slope, Tensor) or isinstance(positive_slope, Tensor):
        # The bend, not the slope, is rounded to the precision of x: it is c/sqrt(n), and a bfloat16 near 1 is off by per cents of that.
        straight = x if isinstance(positive_slope, float) and positive_slope == 1.0 else (positive_slope * x).to(x.dtype)
        bend = torch.as_tensor(negative_slope - positive_slope).to(x.dtype)
        return torch.addcmul(straight, bend, x.clamp(max=0.0))
    if positive_slope == 1.0:
        return torch.nn.functional.leaky_relu(x, negative_slope)
    if positive_slope == 0.0:
        return negative_slope * x.clamp(max=0.0)
    return positive_slope * torch.nn.functional.leaky_relu(x, negative_slope / positive_slope)


def he_constant(negative_slope: float, positive_slope: float = 1.0) -> float:
    r"""$c = 1/\mathbb{E}\,\sigma_s(g)^2 = 2/(s_+^2 + s_-^2)$ (Eq. resnet): keeps the variance of a layer's features."""
    if positive_slope == negative_slope == 0.0:
        raise ValueError("negative_slope and positive_slope must not both be 0: nothing would pass, got 0.0 and 0.0")
    return 2.0 / (positive_slope**2 + negative_slope**2)


def layer_norm(X: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
    """Each token brought to mean 0 and variance 1 over its features, without gain or bias, as at initialisation.

    Like PyTorch's, it adds 1e-5 to the variance: tokens of variance 1e-5 and less stay short.
    """
    return torch.nn.functional.layer_norm(X, X.shape[-1:])
