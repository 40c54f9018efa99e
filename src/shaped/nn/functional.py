"""The formulas that both a step of a random network and a trainable module compute."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from shaped.nn.activations.relu import he_constant as he_constant
from shaped.nn.activations.relu import shaped_relu as shaped_relu
from shaped.nn.attention import shaped_attention as shaped_attention

RMS_EPS = 1e-6
"""What is added to the mean square, so that a vector of zeros stays zero."""


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


def rotate(x: Float[Tensor, "*batch m k"], frequencies: Float[Tensor, " pairs"]) -> Float[Tensor, "*batch m k"]:
    r"""RoPE: the pair (i, i + k/2) of the features of token $\alpha$ turned by the angle $\alpha\,\theta_i$ (Su et al. 2021)."""
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequencies.to("cpu", torch.float64)
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    one, other = x.chunk(2, -1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)


def layer_norm(X: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
    """Each token brought to mean 0 and variance 1 over its features, without gain or bias, as at initialisation.

    Like PyTorch's, it adds 1e-5 to the variance: tokens of variance 1e-5 and less stay short.
    """
    return torch.nn.functional.layer_norm(X, X.shape[-1:])


def rms_norm(x: Float[Tensor, "*batch n"], eps: float = RMS_EPS) -> Float[Tensor, "*batch n"]:
    r"""$x\,(\overline{x^2} + \epsilon)^{-1/2}$, the mean over the features (Zhang and Sennrich 2019, Eq. 4), without gain.

    Half precisions are computed in single precision and rounded once.
    """
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=eps).to(x.dtype)
