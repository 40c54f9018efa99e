"""`attn_implementation="shaped"`: shaped attention for every Hugging Face model that goes through the attention interface."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from shaped.nn.attention import shaped_attention
from shaped.nn.modules import AttentionShaping, ShapedSelfAttention

NAME = "shaped"
NOT_HERE = ("softcap", "s_aux", "indices", "block_indices")
"""What some models change about the softmax: capped logits, sinks, sparse selections."""

Observer = Callable[[nn.Module, Tensor, Tensor, float, Tensor | None, bool], None]
observers: list[Observer] = []
"""Called with (module, queries, keys, scale, mask, causal) at each shaped attention: diagnostics put themselves here for a while."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Eq. shaped-attention-train with the gains of the module.

    Cross-attention stays as it is: a query that is none of the keys has no value of its own.
    """
    for name in NOT_HERE:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} must be None for attn_implementation='{NAME}', got one from {type(module).__name__}")
    if is_cross_attention(module):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias=position_bias, **kwargs
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal or getattr(module, "is_decoder", False) is True  # some decoders (UMT5) do not say that they are causal
    Q, K = query.shape[-2], key.shape[-2]
    if attention_mask is None and causal and 1 < Q < K:  # an empty static cache: only its first places are filled
        key, value, K = key[..., :Q, :], value[..., :Q, :], Q
        position_bias = None if position_bias is None else position_bias[..., :Q]
    if Q > K or (Q < K and not causal):
        raise ValueError(
            f"{type(module).__name__} must be self-attention for attn_implementation='{NAME}', got {Q} queries and {K} keys without a "
            "causal mask: which of the keys is a query's own?"
        )
    mask = _additive(position_bias, attention_mask, causal and attention_mask is None) if position_bias is not None else attention_mask
    if mask is not None and mask.dtype != torch.bool:  # the least number stands for minus infinity
        mask = mask.to(query.dtype)
        mask = mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)
    positions = None if mask is None or Q == K else places(mask, Q)
    causal = causal and mask is None
    gamma1, gamma2 = gains_of(module)
    scale = (query.shape[-1] ** -0.5 if scaling is None else scaling) * getattr(module, "shaped_temperature", 1.0)
    for observer in observers:
        observer(module, query, key, scale, mask, causal)
    arguments: dict[str, Any] = {"gamma1": gamma1, "gamma2": gamma2, "scale": scale, "is_causal": causal, "attn_mask": mask}
    arguments |= {"positions": positions, "dropout_p": dropout}
    if kwargs.get("output_attentions", getattr(getattr(module, "config", None), "output_attentions", False)):
        weights = attention_weights(query, key, value, **arguments)
        return (weights @ _for_each(query.shape[1], value)).transpose(1, 2).contiguous(), weights
    return shaped_attention(query, key, value, **arguments).transpose(1, 2).contiguous(), None


def gains_of(module: nn.Module) -> tuple[Tensor | float, ...]:
    """A module's gamma1 and gamma2: those of its shaping, 0 if that is None, which says that it is plain, and 1 if it knows of none."""
    if not hasattr(module, "shaping"):
        return 1.0, 1.0
    return module.shaping() if isinstance(module.shaping, AttentionShaping) else (0.0, 0.0)


def attention_weights(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    """The matrix A itself, [batch, heads, Q, K]: what shaped attention makes of values that are one-hot."""
    one_hot = torch.eye(key.shape[-2], dtype=value.dtype, device=value.device).expand(*key.shape[:-1], key.shape[-2])
    return shaped_attention(query, key, one_hot, **arguments)


def places(mask: Tensor, Q: int) -> Tensor:
    """The queries' own places among the keys, [Q]: they stand together, the last of them at the last key that is attended to at all."""
    allowed = mask if mask.dtype == torch.bool else mask > -torch.inf
    last = (allowed * torch.arange(allowed.shape[-1], device=mask.device)).amax()
    return last + torch.arange(1 - Q, 1, device=mask.device)


def is_cross_attention(module: nn.Module) -> bool:
    """Do the keys come from elsewhere? The module's place in its model says so (`mark_roles`), or an attribute, or its class's name."""
    default = "CrossAttention" in type(module).__name__
    return bool(getattr(module, "attends_elsewhere", getattr(module, "is_cross_attention", default) or default))


def mark_roles(model: nn.Module) -> None:
    """Tells modules apart that are of one class, by their names within a layer: encoder_attn, EncDecAttention, cross_attn…"""
    for name, module in model.named_modules():
        if goes_through_the_interface(type(module)):
            within_layer = re.split(r"\.\d+(?=\.|$)", name)[-1]
            named = re.search(r"cross|encoder_attn|enc(oder)?_?dec", within_layer, re.IGNORECASE) is not None
            elsewhere = named or "CrossAttention" in type(module).__name__ or bool(getattr(module, "is_cross_attention", False))
            module.__dict__["attends_elsewhere"] = elsewhere


def self_attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hand queries, keys and values of one sequence to the interface, by name."""
    mark_roles(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ShapedSelfAttention) or (goes_through_the_interface(type(module)) and not is_cross_attention(module))
    }


@cache
def goes_through_the_interface(kind: type[nn.Module]) -> bool:
    """Does this class hand its own queries, keys and values to the attention interface?"""
    try:
        return kind.__name__ != "Attend" and "get_interface(" in inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return False


@cache
def has_attention_of_its_own(kind: type[nn.Module]) -> bool:
    """Does this class compute a softmax itself, whatever attention is chosen?"""
    try:
        source = inspect.getsource(kind) if "Attention" in kind.__name__ and kind.__module__.startswith("transformers.") else ""
    except (OSError, TypeError):
        return False
    return "softmax" in source and "get_interface(" not in source


def mask_forward(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    **named: Any,
) -> Tensor | None:
    """Boolean masks, as for `sdpa`; where it is padding alone that masks, [batch, 1, 1, keys], for which centring is a masked mean.

    In a causal one the last query attends to its own key also where that is padding: `places` tells the queries' places by it.
    """
    mask = sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, **named)  # pyright: ignore[reportArgumentType]
    if mask is None:
        return None
    if mask_function is bidirectional_mask_function:
        return mask[..., :1, :]
    if q_length == kv_length:
        return mask
    queries, keys = torch.arange(q_length, device=mask.device), torch.arange(kv_length, device=mask.device) + kv_offset
    return mask | (queries == q_length - 1)[:, None] & (keys == q_offset + q_length - 1)


def _additive(bias: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """A bias of positions (T5), with minus infinity where the mask or causality forbids."""
    if causal:
        Q, K = bias.shape[-2:]
        mask = torch.arange(K, device=bias.device) <= torch.arange(K - Q, K, device=bias.device)[:, None]
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _for_each(heads: int, values: Tensor) -> Tensor:
    return values.repeat_interleave(heads // values.shape[1], 1)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, mask_forward)
