"""Shaped attention on top of PyTorch's fused kernels: no m x m matrix of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shaped.checks import SINGLE, finite, in_range
from shaped.kernels import attention_correction as fused
from shaped.kernels.attention_correction import Gain


def shaped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gamma1: Gain = 1.0,
    gamma2: Gain = 1.0,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    positions: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    r"""$\gamma_1 v + \text{softmax}(q k^\top \text{scale} + B)\,v - \gamma_2\,\text{softmax}(B)\,v$ (Eq. shaped-attention-train).

    The softmax goes through `scaled_dot_product_attention`. The centring, the attention at zero logits, is a mean of the values
    without a mask, a running mean for the causal mask, both masked where there is key padding, one product for all heads for any other
    boolean mask, and a second call of the fused kernel, with zero queries, for a bias or a mask that differs between heads. With
    gamma1 = gamma2 = 0 this is `scaled_dot_product_attention`. On a GPU `fused` takes over where it can; this is its reference.

    Args:
        q: queries, [..., heads, Q, E].
        k, v: keys and values, [..., key heads, K, E]; the number of key heads must divide that of heads (grouped queries), and K may be
            larger than Q (a cache): the queries then are the last Q of the K tokens, unless `positions` says otherwise.
        gamma1, gamma2: weights of identity and centring: numbers, or tensors that broadcast with [heads, Q, E], such as [heads, 1, 1], and
            may require gradients.
        scale: factor of the logits; 1/sqrt(E) by default. The paper's further 1/sqrt(n) is in the initial weights (`shaped.nn`).
        is_causal: a query sees the keys up to its own place.
        attn_mask: booleans (True: attend) or a bias on the logits, to broadcast with [..., heads, Q, K]. Key padding is [batch, 1, 1, K]. A
            query that may attend to nothing gets 0, not even its own value.
        positions: each query's place among the keys, [Q], [1, Q] or [batch, Q], where the queries are not the last tokens (a static cache).
        dropout_p: dropout of the softmax alone; identity and centring are not dropped.
    """
    check_tensors(q=q, k=k, v=v)
    check_tensors(optional=True, attn_mask=attn_mask, positions=positions)
    q, k, v, attn_mask = _autocast(q, k, v, attn_mask)
    check_arguments(q, k, v, attn_mask, positions, scale, gamma1, gamma2, dropout_p)
    Q, K, heads = q.shape[-2], k.shape[-2], q.shape[-3]
    if positions is not None and positions.ndim == 2:
        positions = positions.expand(q.shape[0], -1)
    aligned = positions is None and Q == K
    real = attn_mask.mT if is_causal and aligned and attn_mask is not None and _is_padding(attn_mask) else None
    if is_causal and (attn_mask is not None or not aligned) and not (attn_mask is None and positions is None and Q == 1):
        # The fused kernels' own causal mask starts at the first key, whatever the queries' places, and takes no other mask beside it.
        attn_mask = _with_causal(attn_mask, _places(q, K, positions), K)
    causal = bool(is_causal and aligned and attn_mask is None)
    grouped = False
    if heads > k.shape[-3]:  # under a compiler the comparison is symbolic, but the kernel wants a bool
        grouped = True
    some = None
    if attn_mask is not None:
        attn_mask, some = _attending(attn_mask)
    shapes = not (_is_zero(gamma1) and _is_zero(gamma2))
    if shapes and aligned and attn_mask is None and dropout_p == 0.0 and fused.fits(q, v, gamma1, gamma2):
        return fused.attention(q, k, v, gamma1, gamma2, scale, causal)
    attended = scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    if shapes:
        own, resting = own_values(v, Q, positions), resting_values(q, v, attn_mask, causal, real)
        attended = _plus(_plus(attended, gamma1, _for_each(heads, own)), gamma2, _for_each(heads, resting), sign=-1)
    return attended if some is None else torch.where(some, attended, 0.0)


def own_values(v: Tensor, Q: int, positions: Tensor | None) -> Tensor:
    """Each query's own value, [..., key heads, Q, E]."""
    if positions is None:
        return v[..., v.shape[-2] - Q :, :]
    if positions.ndim == 1:
        return v.index_select(-2, positions)
    return v.gather(-2, positions[:, None, :, None].expand(-1, v.shape[-3], -1, v.shape[-1]))


def resting_values(q: Tensor, v: Tensor, attn_mask: Tensor | None, causal: bool, real: Tensor | None = None) -> Tensor:
    """softmax(B) v: the values under attention at zero logits, for each key head, or for each head where the mask differs between heads.

    `real`, [..., K, 1], says that the mask is the causal one and which keys are not padding.
    """
    sums = torch.float32 if v.dtype in (torch.float16, torch.bfloat16) else v.dtype
    if real is not None:
        return running_mean(v, sums, real)
    if attn_mask is None:
        return running_mean(v, sums) if causal else v.mean(-2, keepdim=True, dtype=sums).to(v.dtype)
    by_head = _by_head(attn_mask)
    if attn_mask.dtype == torch.bool and not by_head:
        weights = (attn_mask.to(sums) / attn_mask.sum(-1, keepdim=True)).to(v.dtype)
        if _is_padding(attn_mask):
            return weights @ v
        weights = weights if weights.ndim == 2 else weights.squeeze(-3)
        return (weights @ v.transpose(-2, -3).flatten(-2)).unflatten(-1, (v.shape[-3], -1)).transpose(-2, -3)
    heads = q.shape[-3] if by_head else v.shape[-3]
    no_query = v.new_zeros(*v.shape[:-3], heads, q.shape[-2], q.shape[-1])
    no_key = v.new_zeros(*v.shape[:-1], q.shape[-1])
    return scaled_dot_product_attention(no_query, no_key, v, attn_mask=attn_mask, enable_gqa=heads > v.shape[-3])


def running_mean(v: Tensor, sums: torch.dtype, real: Tensor | None = None, block: int = 64) -> Tensor:
    """The mean of each token's value and all before it, of those that are `real`, [..., m, 1], if that is given; 0 where there is none.

    Sums within blocks are products with a triangle of ones, for which there are fast kernels (a cumulative sum along this dimension is
    several times slower on a GPU); sums of whole blocks are few.
    """
    m = v.shape[-2]
    if real is None:
        counts = torch.arange(1, m + 1, device=v.device, dtype=sums)[:, None]
    else:
        v, counts = v * real, real.cumsum(-2, dtype=sums).clamp(min=1.0)
    if fused.exporting():  # cutting into blocks would fix the length of the exported program
        return (v.cumsum(-2, dtype=sums) / counts).to(v.dtype)
    blocks = torch.nn.functional.pad(v, (0, 0, 0, -m % block)).unflatten(-2, (-1, block))
    # Means over `block` in place of sums, which would leave the range of float16.
    within = (v.new_ones(block, block).tril() / block) @ blocks
    whole = blocks.mean(-2, keepdim=True, dtype=sums)
    before = torch.nn.functional.pad(whole.cumsum(-3), (0, 0, 0, 0, 1, 0))[..., :-1, :, :]
    return ((within + before).flatten(-3, -2)[..., :m, :] * (block / counts)).to(v.dtype)


def _is_padding(mask: Tensor) -> bool:
    """Is it one row of booleans for all queries and heads?"""
    return mask.dtype == torch.bool and mask.shape[-2] == 1 and not _by_head(mask)


def _by_head(mask: Tensor) -> bool:
    return mask.ndim >= 3 and mask.shape[-3] > 1


def _plus(x: Tensor, gamma: Gain, values: Tensor, sign: int = 1) -> Tensor:
    """x ± gamma · values, without a tensor for the product where gamma is a number."""
    if isinstance(gamma, Tensor):
        return torch.addcmul(x, gamma.to(x.dtype), values, value=sign)
    return torch.add(x, values, alpha=sign * gamma)


def _for_each(heads: int, values: Tensor) -> Tensor:
    """Values of key heads, for each of the heads that share them."""
    return values if values.shape[-3] == heads else values.repeat_interleave(heads // values.shape[-3], -3)


def _places(q: Tensor, K: int, positions: Tensor | None) -> Tensor:
    """Each query's place among the keys, to compare with the keys' places: [Q, 1] or [batch, 1, Q, 1]."""
    if positions is None:
        return torch.arange(K - q.shape[-2], K, device=q.device)[:, None]
    return positions[:, None] if positions.ndim == 1 else positions[:, None, :, None]


def _with_causal(mask: Tensor | None, places: Tensor, K: int) -> Tensor:
    past = torch.arange(K, device=places.device) <= places
    if mask is None:
        return past
    return mask & past if mask.dtype == torch.bool else mask.masked_fill(~past, -torch.inf)


def _attending(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mask, opened where a query may attend to nothing (a softmax over nothing is not a number), and which queries may attend."""
    some = (mask if mask.dtype == torch.bool else mask > -torch.inf).any(-1, keepdim=True)
    return (mask | ~some if mask.dtype == torch.bool else mask.masked_fill(~some, 0.0)), some


def _autocast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The arguments as autocast would hand them to the fused kernel."""
    kind = q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # the meta device has no autocast
        return q, k, v, mask
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v, mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)


def _is_zero(gamma: Gain) -> bool:
    return not isinstance(gamma, Tensor) and gamma == 0.0


def check_tensors(optional: bool = False, **tensors: object) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor) and not (optional and x is None):
            raise ValueError(f"{name} must be a tensor, got {x!r}")


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    scale: float | None = None,
    gamma1: Gain = 1.0,
    gamma2: Gain = 1.0,
    dropout_p: float = 0.0,
) -> None:
    """Raises a ValueError that names the argument."""
    in_range("dropout_p", dropout_p, 0.0, 1.0)
    if scale is not None:
        finite("scale", scale, SINGLE)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 3:
            raise ValueError(f"{name} must be [..., heads, tokens, features], got shape {tuple(x.shape)}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"v must have the batch, heads and tokens of k, {tuple(k.shape[:-1])}, got {tuple(v.shape[:-1])}")
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"k must have the batch of q, {tuple(q.shape[:-3])}, got {tuple(k.shape[:-3])}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k must have the features of q, {q.shape[-1]}, got {k.shape[-1]}")
    if k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]:
        raise ValueError(f"k must have a number of heads that divides that of q, {q.shape[-3]}, got {k.shape[-3]}")
    Q, K = q.shape[-2], k.shape[-2]
    if positions is None and Q > K:
        raise ValueError(f"q must have no more tokens than k, {K}, unless positions are given, got {Q}")
    if positions is not None:
        fits = positions.ndim == 1 or (positions.ndim == 2 and q.ndim == 4 and positions.shape[0] in (1, q.shape[0]))
        if not fits or positions.shape[-1] != Q or positions.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"positions must be whole numbers, [{Q}] or [batch, {Q}], got {positions.dtype}, {tuple(positions.shape)}")
        if positions.device != q.device:
            raise ValueError(f"positions must be on the device of q, {q.device}, got {positions.device}")
        _check_places(positions, K)
    if mask is not None:
        wanted = (*q.shape[:-1], K)
        fits = 2 <= mask.ndim <= len(wanted) and all(m in (1, w) for m, w in zip(mask.shape[::-1], wanted[::-1], strict=False))
        if not fits or mask.shape[-1] != K:
            raise ValueError(f"attn_mask must broadcast with [..., heads, Q, K] = {list(wanted)}, got shape {tuple(mask.shape)}")
        if mask.device != q.device:
            raise ValueError(f"attn_mask must be on the device of q, {q.device}, got {mask.device}")
        if mask.dtype not in (torch.bool, q.dtype):
            raise ValueError(f"attn_mask must be boolean or of the dtype of q, {q.dtype}, got {mask.dtype}")
    wanted = (*q.shape[:-1], v.shape[-1])
    for name, gamma in (("gamma1", gamma1), ("gamma2", gamma2)):
        if not isinstance(gamma, Tensor):
            finite(name, gamma)
        else:
            if gamma.device != q.device and gamma.ndim:
                raise ValueError(f"{name} must be on the device of q, {q.device}, got {gamma.device}")
            if gamma.ndim > len(wanted) or any(g not in (1, w) for g, w in zip(gamma.shape[::-1], wanted[::-1], strict=False)):
                raise ValueError(f"{name} must broadcast into the output, {list(wanted)}, such as [heads, 1, 1], got {list(gamma.shape)}")


def _check_places(positions: Tensor, K: int) -> None:
    """Where reading them takes no waiting for a GPU and no compiler looks on."""
    if positions.is_cpu and positions.numel() and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        low, high = (int(place) for place in positions.aminmax())
        if low < 0 or high >= K:
            raise ValueError(f"positions must be places among the {K} keys, 0 to {K - 1}, got {low if low < 0 else high}")
