"""What to watch while a deep Transformer trains: the entropy of its attention and how alike its tokens are."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_entropy(
    q: Tensor, k: Tensor, *, scale: float | None = None, is_causal: bool = False, attn_mask: Tensor | None = None, block: int = 128
) -> Tensor:
    r"""Entropy of each query's softmax, in nats, [..., heads, Q]: $H = \log\sum_j e^{s_j} - \sum_j p_j s_j$; 0 where there is none.

    Uniform attention to m tokens has entropy log m. The logits are made for `block` queries at a time; arguments as in `shaped_attention`,
    with the queries the last of the tokens. Logits are in single precision at least, also under autocast.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _entropy(q, k, scale, is_causal, attn_mask, block)


def _entropy(q: Tensor, k: Tensor, scale: float | None, is_causal: bool, attn_mask: Tensor | None, block: int) -> Tensor:
    q, k = (x.double() if x.dtype == torch.float64 else x.float() for x in (q, k))
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
    x = x.double() if x.dtype == torch.float64 else x.float()
    directions = torch.nn.functional.normalize(x, dim=-1)
    if real is not None:
        directions = directions * real[..., None]
    m = torch.full_like(x[..., 0, 0], x.shape[-2]) if real is None else real.to(x.dtype).sum(-1)
    own = directions.square().sum((-1, -2))
    return (directions.sum(-2).square().sum(-1) - own) / (m * (m - 1))
