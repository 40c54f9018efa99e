"""The formulas that both a step of a random network and a trainable module compute."""

from __future__ import annotations

from functools import lru_cache

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


def rotary_frequencies(
    width: int, base: float, dtype: torch.dtype = torch.float64, device: torch.device | None = None
) -> Float[Tensor, " pairs"]:
    r"""$\theta_i = \text{base}^{-2i/\text{width}}$, i = 0 … width/2 - 1: the frequencies of RoPE (Su et al. 2021, Eq. 15)."""
    return base ** -(torch.arange(0, width, 2, dtype=dtype, device=device) / width)


@lru_cache(maxsize=8)
def rotation_of_places(m: int, frequencies: tuple[float, ...]) -> tuple[Float[Tensor, "m pairs"], Float[Tensor, "m pairs"]]:
    r"""Cosine and sine of the angles $\alpha\,\theta_i$ of m tokens at the places 0 … m - 1, in double precision.

    They are kept for later calls, so they must not depend on the caller's inference mode and default device.
    """
    with torch.inference_mode(False), torch.device("cpu"):
        angles = torch.arange(m, dtype=torch.float64)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
        return angles.cos(), angles.sin()


def rotate(
    x: Float[Tensor, "*batch k"], cos: Float[Tensor, "*#batch pairs"], sin: Float[Tensor, "*#batch pairs"]
) -> Float[Tensor, "*batch k"]:
    """RoPE: features i and i + pairs are turned by the angle with this cosine and sine. Features beyond the pairs stay as they are."""
    pairs = cos.shape[-1]
    one, other = x[..., :pairs], x[..., pairs : 2 * pairs]
    turned = [one * cos - other * sin, other * cos + one * sin]
    return torch.cat(turned if 2 * pairs == x.shape[-1] else [*turned, x[..., 2 * pairs :]], -1).to(x.dtype)


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
