"""What to watch while a deep Transformer trains: the entropy of its attention and how alike its tokens are."""

from __future__ import annotations

import torch
from torch import Tensor

from shaped.checks import whole_number
from shaped.nn.attention import check_arguments, check_tensors


def attention_entropy(
    q: Tensor, k: Tensor, *, scale: float | None = None, is_causal: bool = False, attn_mask: Tensor | None = None, block: int = 128
) -> Tensor:
    r"""Entropy of each query's softmax, in nats, [..., heads, Q]: $H = \log\sum_j e^{s_j} - \sum_j p_j s_j$; 0 where there is none.

    Uniform attention to m tokens has entropy log m. The logits are made for `block` queries at a time; arguments as in `shaped_attention`,
    with the queries the last of the tokens. Logits are in single precision at least, also under autocast.
    """
    check_tensors(q=q, k=k)
    check_tensors(optional=True, attn_mask=attn_mask)
    whole_number("block", block)
    with torch.autocast(q.device.type, enabled=False):
        q, k = _precise(q), _precise(k)
        mask = _precise(attn_mask) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        check_arguments(q, k, k, mask, scale=scale)
        return _entropy(q, k, scale, is_causal, mask, block)


def _precise(x: Tensor) -> Tensor:
    return x.double() if x.dtype == torch.float64 else x.float()


def _entropy(q: Tensor, k: Tensor, scale: float | None, is_causal: bool, attn_mask: Tensor | None, block: int) -> Tensor:
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    Q, K = q.shape[-2], k.shape[-2]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    entropies = []
    for start in range(0, Q, block):
        rows = slice(start, min(start + block, Q))
        s = q[..., rows, :] @ k.mT * factor
        if attn_mask is not None:
            mask = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., rows, :]
            s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
        if is_causal:
            places = torch.arange(K - Q, K, device=q.device)[rows, None]
            s = s.masked_fill(torch.arange(K, device=q.device) > places, -torch.inf)
        log_p = torch.log_softmax(s, -1)
        entropies.append(-torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0.0).sum(-1))
    return torch.cat(entropies, -1)


def token_correlation(x: Tensor, real: Tensor | None = None) -> Tensor:
    r"""Mean over pairs of tokens of $\rho^{ab} = \langle x^a, x^b\rangle / |x^a||x^b|$, one a sequence: [..., m, n] to [...].

    `real` is False or 0 at padding, [..., m]. A sequence of fewer than two tokens has no pair, and gives nan.
    """
    check_tensors(x=x)
    check_tensors(optional=True, real=real)
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(f"x must be floats [..., tokens, features], got {x.dtype}, {list(x.shape)}")
    real = torch.ones(x.shape[:-1], device=x.device) if real is None else real
    if real.shape != x.shape[:-1]:
        raise ValueError(f"real must be [..., tokens] = {list(x.shape[:-1])}, got shape {list(real.shape)}")
    x, real = _precise(x), real != 0
    directions = torch.nn.functional.normalize(x, dim=-1) * real[..., None]
    m = real.to(x.dtype).sum(-1)
    own = directions.square().sum((-1, -2))
    return (directions.sum(-2).square().sum(-1) - own) / (m * (m - 1))
