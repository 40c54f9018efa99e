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
from transformers.utils.output_capturing import _active_collector

from shaped.nn.attention import shaped_attention
from shaped.nn.attention_hooks import call_attention_hooks
from shaped.nn.modules import ShapedSelfAttention

NAME = "shaped"
NOT_HERE = ("softcap", "s_aux", "indices", "block_indices")
"""What some models change about the softmax: capped logits, sinks, sparse selections."""


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
    wanted = matrices_wanted(module, kwargs.pop("output_attentions", None))
    if is_cross_attention(module):
        kwargs |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "position_bias": position_bias}
        values = one_hot_values(key, value) if wanted else value
        attended, _ = sdpa_attention_forward(module, query, key, values, attention_mask, **kwargs)
        return mixed_by(attended.transpose(1, 2), value) if wanted else (attended, None)
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
    call_attention_hooks(module, query, key, scale, mask, causal)
    arguments: dict[str, Any] = {"gamma1": gamma1, "gamma2": gamma2, "scale": scale, "is_causal": causal, "attn_mask": mask}
    arguments |= {"positions": positions, "dropout_p": dropout}
    if wanted:
        return mixed_by(shaped_attention(query, key, one_hot_values(key, value), **arguments), value)
    return shaped_attention(query, key, value, **arguments).transpose(1, 2).contiguous(), None


def gains_of(module: nn.Module) -> tuple[Tensor | float, Tensor | float]:
    """A module's gamma1 and gamma2: those of its shaping, 0 if that is None, which says that it is plain, and 1 if it knows of none.

    The shaping is called, whatever its class: a wrapper (PEFT's `modules_to_save`, FSDP) hands the call on.
    """
    if not hasattr(module, "shaping"):
        return 1.0, 1.0
    if module.shaping is None:
        return 0.0, 0.0
    found = module.shaping() if callable(module.shaping) else module.shaping
    if isinstance(found, tuple) and len(found) == 2 and all(isinstance(gain, Tensor | float) for gain in found):
        return found
    got = type(module.shaping).__name__
    raise ValueError(f"shaping of {type(module).__name__} must be None or a module that gives gamma1 and gamma2 when called, got {got}")


def matrices_wanted(module: nn.Module, argument: bool | None) -> bool:
    """Must the matrices A be made? Some models (GPT-2, OPT) do not hand `output_attentions` on; transformers collects what it finds."""
    if argument or (argument is None and getattr(getattr(module, "config", None), "output_attentions", False)):
        return True
    if torch.compiler.is_compiling() and not _active_collector.compiling:  # a layer compiled on its own: no compiler sees context variables
        return False
    return any("attentions" in name for name in _active_collector.get() or ())


def one_hot_values(key: Tensor, value: Tensor) -> Tensor:
    """Values of which any attention makes its own matrix, [batch, key heads, K, K]."""
    return torch.eye(key.shape[-2], dtype=value.dtype, device=value.device).expand(*key.shape[:-1], key.shape[-2])


def mixed_by(weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [batch, Q, heads, E] by matrices [batch, heads, Q, K], and those matrices, as the attention interface wants them."""
    return (weights @ value.repeat_interleave(weights.shape[1] // value.shape[1], 1)).transpose(1, 2).contiguous(), weights


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


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, mask_forward)
