"""Shaped attention on top of PyTorch's fused attention kernels. It makes no m x m matrix itself, except masks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import handle_torch_function, has_torch_function_variadic

from shaped.checks import SINGLE, finite, in_range, quote
from shaped.kernels import attention_correction
from shaped.kernels.attention_correction import Gain
from shaped.kernels.availability import is_exporting

MASKED = -5000.0
"""Where models mask with numbers, a logit at or below this is masked: they take -inf, the dtype's minimum, -1e9 or -1e4. To the last of
these some add the product of queries and keys, and in bfloat16 it is -9984: so the level is far above it. A true bias gets there too where
there are very many tokens, ALiBi's at ten thousand; counted from the query, it leaves nothing of such a key anyway."""


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
    enable_gqa: bool = True,
) -> Tensor:
    r"""$\gamma_1 v + \text{softmax}(q k^\top \text{scale} + B)\,v - \gamma_2\,\text{softmax}(B)\,v$ (Eq. shaped-attention-train).

    The softmax is `scaled_dot_product_attention`. The centring, softmax(B) v, is the attention at zero logits. It is computed as

    - the mean of the values, without a mask;
    - a running mean, for the causal mask; both means skip padded keys;
    - one matrix product for all heads, for any other boolean mask;
    - a second `scaled_dot_product_attention` with zero queries, for a bias, or for a mask that differs between heads.

    With gamma1 = gamma2 = 0 this is `scaled_dot_product_attention`. On a GPU `kernels.attention_correction` is used where it fits.

    Args:
        q: queries, [..., heads, Q, E].
        k, v: keys and values, [..., key heads, K, E]. The number of key heads must divide the number of heads (grouped queries). K may be
            larger than Q (a cache): the queries are then the last Q of the K tokens, unless `positions` is given.
        gamma1, gamma2: weights of identity and centring: numbers, or tensors that broadcast with [heads, Q, E], such as [heads, 1, 1].
            Tensors may require gradients.
        scale: factor of the logits; 1/sqrt(E) by default. The paper's further 1/sqrt(n) is in the initial weights (`shaped.nn`).
        is_causal: a query attends to the keys up to its own position.
        attn_mask: booleans (True: attend) or a bias on the logits, broadcast with [..., heads, Q, K]. Key padding is [batch, 1, 1, K].
            The output is 0 for a query that may attend to no key.
        positions: each query's index among the keys, [Q], [1, Q] or [batch, Q], if the queries are not the last tokens (a static cache).
        dropout_p: dropout of the softmax. Identity and centring are not dropped.
        enable_gqa: False refuses fewer key heads than heads, as `scaled_dot_product_attention` does by default.
    """
    if not enable_gqa and q.shape[-3] != k.shape[-3]:
        raise ValueError(f"k must have as many heads as q, {q.shape[-3]}, without enable_gqa, got {k.shape[-3]}")
    if has_torch_function_variadic(q, k, v):  # a TorchFunctionMode sees one call, as of PyTorch's own attention
        arguments = {"gamma1": gamma1, "gamma2": gamma2, "scale": scale, "is_causal": is_causal, "attn_mask": attn_mask}
        arguments |= {"positions": positions, "dropout_p": dropout_p}
        return handle_torch_function(shaped_attention, (q, k, v), q, k, v, **arguments)
    check_tensors(q=q, k=k, v=v)
    check_tensors(optional=True, attn_mask=attn_mask, positions=positions)
    q, k, v, attn_mask = _autocast(q, k, v, attn_mask)
    check_arguments(q, k, v, attn_mask, positions, scale, gamma1, gamma2, dropout_p)
    Q, K, heads = q.shape[-2], k.shape[-2], q.shape[-3]
    if positions is not None and positions.ndim == 2:
        positions = positions.expand(q.shape[0], -1)
    aligned = positions is None and Q == K
    not_padding = attn_mask.mT if is_causal and aligned and attn_mask is not None and _is_padding(attn_mask) else None
    if is_causal and (attn_mask is not None or not aligned) and not (attn_mask is None and positions is None and Q == 1):
        # The causal mask of the stock kernels assumes that query 0 is at key 0, and excludes any other mask.
        attn_mask = _add_causal_mask(attn_mask, index_queries(q, K, positions), K)
    causal = grouped = False  # under a compiler comparisons of sizes are symbolic, but the kernel needs a bool
    if is_causal and aligned and attn_mask is None:
        causal = True
    if heads > k.shape[-3]:
        grouped = True
    has_keys = None
    if attn_mask is not None:
        attn_mask, has_keys = _open_empty_rows(attn_mask)
    is_shaped = not (_is_zero(gamma1) and _is_zero(gamma2))
    if is_shaped and aligned and attn_mask is None and dropout_p == 0.0 and attention_correction.fits(q, v, gamma1, gamma2):
        return attention_correction.attention(q, k, v, gamma1, gamma2, scale, causal)
    if scale == 0.0:  # the stock kernel of CPUs would multiply it with the -inf of its causal mask
        q, scale = 0.0 * q, None
    attended = scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    if is_shaped:
        own, centring = _select_own_values(v, Q, positions), _centre_values(q, v, attn_mask, causal, not_padding)
        attended = _add_scaled(attended, gamma1, _repeat_for_heads(heads, own))
        attended = _add_scaled(attended, gamma2, _repeat_for_heads(heads, centring), sign=-1)
    return attended if has_keys is None else torch.where(has_keys, attended, 0.0)


def _select_own_values(v: Tensor, Q: int, positions: Tensor | None) -> Tensor:
    """Each query's own value, [..., key heads, Q, E]."""
    if positions is None:
        return v[..., v.shape[-2] - Q :, :]
    if positions.ndim == 1:
        return v.index_select(-2, positions)
    return v.gather(-2, positions[:, None, :, None].expand(-1, v.shape[-3], -1, v.shape[-1]))


def _centre_values(q: Tensor, v: Tensor, attn_mask: Tensor | None, causal: bool, not_padding: Tensor | None = None) -> Tensor:
    """softmax(B) v, the attention at zero logits, [..., key heads, Q or 1, E]; [..., heads, Q, E] if the mask differs between heads.

    `not_padding`, [..., K, 1], is given if the mask is the causal mask with key padding.
    """
    accumulator = torch.float32 if v.dtype in (torch.float16, torch.bfloat16) else v.dtype
    if not_padding is not None:
        return running_mean(v, accumulator, not_padding)
    if attn_mask is None:
        return running_mean(v, accumulator) if causal else v.mean(-2, keepdim=True, dtype=accumulator).to(v.dtype)
    per_head = _is_per_head(attn_mask)
    if attn_mask.dtype == torch.bool and not per_head:
        weights = (attn_mask.to(accumulator) / attn_mask.sum(-1, keepdim=True)).to(v.dtype)
        if _is_padding(attn_mask):
            return weights @ v
        weights = weights if weights.ndim == 2 else weights.squeeze(-3)
        return (weights @ v.transpose(-2, -3).flatten(-2)).unflatten(-1, (v.shape[-3], -1)).transpose(-2, -3)
    heads = q.shape[-3] if per_head else v.shape[-3]
    zero_queries = v.new_zeros(*v.shape[:-3], heads, q.shape[-2], q.shape[-1])
    zero_keys = v.new_zeros(*v.shape[:-1], q.shape[-1])
    return scaled_dot_product_attention(zero_queries, zero_keys, v, attn_mask=attn_mask, enable_gqa=heads > v.shape[-3])


def running_mean(v: Tensor, accumulator: torch.dtype, not_padding: Tensor | None = None) -> Tensor:
    """The mean over each token and all tokens before it. With `not_padding`, [..., m, 1], over those that are True; 0 if none is.

    `accumulator` is the dtype of the sums.
    """
    if not_padding is None:
        counts = torch.arange(1, v.shape[-2] + 1, device=v.device, dtype=accumulator)[:, None]
    else:
        v, counts = v * not_padding, not_padding.cumsum(-2, dtype=accumulator).clamp(min=1.0)
    if v.is_cpu or is_exporting():  # blocks would fix the length of the exported program
        return (v.cumsum(-2, dtype=accumulator) / counts).to(v.dtype)
    return running_mean_by_blocks(v, accumulator, counts)


def running_mean_by_blocks(v: Tensor, accumulator: torch.dtype, counts: Tensor, block: int = 64) -> Tensor:
    """The running sums over `counts`. Sums within blocks are products with a triangle of ones: on a GPU a cumulative sum along this
    dimension is several times slower, and on a CPU it is the faster one. There are few blocks, and their sums are cumulated."""
    m = v.shape[-2]
    blocks = torch.nn.functional.pad(v, (0, 0, 0, -m % block)).unflatten(-2, (-1, block))
    # Divided by `block`: the sums themselves would overflow float16.
    within = (v.new_ones(block, block).tril() / block) @ blocks
    whole = blocks.mean(-2, keepdim=True, dtype=accumulator)
    before = torch.nn.functional.pad(whole.cumsum(-3), (0, 0, 0, 0, 1, 0))[..., :-1, :, :]
    return ((within + before).flatten(-3, -2)[..., :m, :] * (block / counts)).to(v.dtype)


def _is_padding(mask: Tensor) -> bool:
    """Is it one row of booleans for all queries and heads?"""
    return mask.dtype == torch.bool and mask.shape[-2] == 1 and not _is_per_head(mask)


def _is_per_head(mask: Tensor) -> bool:
    return mask.ndim >= 3 and mask.shape[-3] > 1


def _add_scaled(x: Tensor, gamma: Gain, values: Tensor, sign: int = 1) -> Tensor:
    """x ± gamma · values. If gamma is a number, the product needs no memory of its own."""
    if isinstance(gamma, Tensor):
        return torch.addcmul(x, gamma.to(x.dtype), values, value=sign)
    return torch.add(x, values, alpha=sign * gamma)


def _repeat_for_heads(heads: int, values: Tensor) -> Tensor:
    """Values of the key heads, repeated for the query heads that share them."""
    return values if values.shape[-3] == heads else values.repeat_interleave(heads // values.shape[-3], -3)


def index_queries(q: Tensor, K: int, positions: Tensor | None) -> Tensor:
    """Each query's index among the keys, [Q, 1] or [batch, 1, Q, 1], to compare with the indices of the keys."""
    if positions is None:
        return torch.arange(K - q.shape[-2], K, device=q.device)[:, None]
    return positions[:, None] if positions.ndim == 1 else positions[:, None, :, None]


def _add_causal_mask(mask: Tensor | None, positions: Tensor, K: int) -> Tensor:
    past = torch.arange(K, device=positions.device) <= positions
    if mask is None:
        return past
    return mask & past if mask.dtype == torch.bool else mask.masked_fill(~past, -torch.inf)


def _open_empty_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mask, opened for queries that may attend to no key (their softmax would be NaN), and which queries have keys."""
    has_keys = (mask if mask.dtype == torch.bool else mask != -torch.inf).any(-1, keepdim=True)  # NaN is no mask: it must be seen
    return (mask | ~has_keys if mask.dtype == torch.bool else mask.masked_fill(~has_keys, 0.0)), has_keys


def _autocast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Casts the arguments as autocast does for `scaled_dot_product_attention`."""
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
            raise ValueError(f"{name} must be a tensor, got {quote(x)}")


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
        if not x.is_floating_point():
            raise ValueError(f"{name} must have floating-point numbers, got {x.dtype}")
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
        _check_positions(positions, K)
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


def _check_positions(positions: Tensor, K: int) -> None:
    """Checks the range of positions on a CPU. On a GPU it would wait for the device; under a compiler it would break the graph."""
    if positions.is_cpu and positions.numel() and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        low, high = (int(end) for end in positions.aminmax())
        if low < 0 or high >= K:
            raise ValueError(f"positions must be places among the {K} keys, 0 to {K - 1}, got {low if low < 0 else high}")
