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

from shaped.nn.attention import MASKED, shaped_attention
from shaped.nn.attention_hooks import call_attention_hooks
from shaped.nn.modules import ShapedSelfAttention

NAME = "shaped"
UNSUPPORTED = ("softcap", "s_aux", "indices", "block_indices")
"""Arguments of models that change the softmax (capped logits, attention sinks, sparse attention), which shaped attention does not have."""


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
    """Eq. shaped-attention-train with the gains of the module, for the attention interface of transformers.

    Cross-attention stays plain: its queries are not among its keys, so a query has no value of its own for the identity term.
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} must be None for attn_implementation='{NAME}', got one from {type(module).__name__}")
    wanted = wants_matrices(module, kwargs.pop("output_attentions", None))
    if is_cross_attention(module):
        kwargs |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "position_bias": position_bias}
        values = make_one_hot_values(key, value) if wanted else value
        attended, _ = sdpa_attention_forward(module, query, key, values, attention_mask, **kwargs)
        return apply_weights(attended.transpose(1, 2), value) if wanted else (attended, None)
    causal = getattr(module, "is_causal", not getattr(module, "sees_all", False)) if is_causal is None else is_causal
    causal = causal or getattr(module, "is_decoder", False) is True  # some decoders (UMT5) do not say that they are causal
    Q, K = query.shape[-2], key.shape[-2]
    # The prefix of PaliGemma sees itself whole.
    has_prefix = getattr(getattr(module, "config", None), "use_bidirectional_attention", False) is True
    decodes = causal or has_prefix
    if attention_mask is None and decodes and 1 < Q < K:  # prefill of a static cache: only its first Q entries are filled
        key, value, K = key[..., :Q, :], value[..., :Q, :], Q
        position_bias = None if position_bias is None else position_bias[..., :Q]
    if Q > K or (Q < K and not decodes):
        raise ValueError(
            f"{type(module).__name__} must be self-attention for attn_implementation='{NAME}', got {Q} queries and {K} keys without a "
            "causal mask: which of the keys is a query's own?"
        )
    if Q < K and getattr(module, "keep_window_size", K) < K:  # Doge drops keys from the mask, perhaps the one that tells a query's position
        raise ValueError(
            f"keep_window_size must be at least the {K} keys of the cache for attn_implementation='{NAME}', got {module.keep_window_size}; "
            "do without a cache (use_cache=False) or with a larger one"
        )
    mask = _add_mask(position_bias, attention_mask, causal and attention_mask is None) if position_bias is not None else attention_mask
    if mask is not None and not (mask.dtype == torch.bool or mask.is_floating_point()):  # it would be added to the logits
        raise ValueError(f"attention_mask must be boolean or a floating-point bias where it has a row for each query, got {mask.dtype}")
    if mask is not None and mask.dtype != torch.bool:  # Hugging Face masks with the dtype's minimum, callers also with -1e9 or -1e4
        mask = mask.to(query.dtype)
        mask = mask.masked_fill(mask <= MASKED, -torch.inf)
    positions = None if mask is None or Q == K else find_query_positions(mask, Q)
    causal = causal and mask is None
    gamma1, gamma2 = read_gains(module)
    scale = (query.shape[-1] ** -0.5 if scaling is None else scaling) * getattr(module, "shaped_temperature", 1.0)
    call_attention_hooks(module, query, key, scale, mask, causal)
    arguments: dict[str, Any] = {"gamma1": gamma1, "gamma2": gamma2, "scale": scale, "is_causal": causal, "attn_mask": mask}
    arguments |= {"positions": positions, "dropout_p": dropout}
    attended = shaped_attention(query, key, make_one_hot_values(key, value) if wanted else value, **arguments)
    branch = getattr(module, "shaped_branch", 1.0)
    attended = attended if branch == 1.0 else attended * branch
    return apply_weights(attended, value) if wanted else (attended.transpose(1, 2).contiguous(), None)


def read_gains(module: nn.Module) -> tuple[Tensor | float, Tensor | float]:
    """A module's gamma1 and gamma2: those of `module.shaping`; 0 if that is None (plain attention); 1 if there is no such attribute.

    The shaping is called, not read, because it may be wrapped (PEFT's `modules_to_save`, FSDP): a wrapper forwards the call.
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


def wants_matrices(module: nn.Module, argument: bool | None) -> bool:
    """Must the attention matrices be returned? Some models (GPT-2, OPT) do not pass `output_attentions` on; transformers then collects
    them through a context variable."""
    if argument or (argument is None and getattr(getattr(module, "config", None), "output_attentions", False)):
        return True
    if torch.compiler.is_compiling() and not _active_collector.compiling:  # a layer compiled alone: dynamo cannot read context variables
        return False
    return any("attentions" in name for name in _active_collector.get() or ())


def make_one_hot_values(key: Tensor, value: Tensor) -> Tensor:
    """One-hot values, [batch, key heads, K, K]: any attention returns its own matrix for them."""
    return torch.eye(key.shape[-2], dtype=value.dtype, device=value.device).expand(*key.shape[:-1], key.shape[-2])


def apply_weights(weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Applies matrices [batch, heads, Q, K] to the values; returns tokens [batch, Q, heads, E] and the matrices, as the interface wants."""
    return (weights @ value.repeat_interleave(weights.shape[1] // value.shape[1], 1)).transpose(1, 2).contiguous(), weights


def find_query_positions(mask: Tensor, Q: int) -> Tensor:
    """The positions of the queries among the keys, [Q]: consecutive, the last query that attends to a key at the last such key.

    Queries after it are padding.
    """
    allowed = (mask if mask.dtype == torch.bool else mask > -torch.inf).expand(*mask.shape[:-2], Q, -1).flatten(0, -3).any(0)
    queries, keys = (torch.arange(size, device=mask.device) for size in allowed.shape)
    last = (allowed.any(-1) * queries).amax()
    return (allowed * keys).amax(-1).index_select(0, last[None]) + queries - last


def is_cross_attention(module: nn.Module) -> bool:
    """Do the keys come from another sequence? `mark_roles` has marked the module, or an attribute or the name of its class says so."""
    default = "CrossAttention" in type(module).__name__
    return bool(getattr(module, "attends_elsewhere", getattr(module, "is_cross_attention", default) or default))


def mark_roles(model: nn.Module) -> None:
    """Marks cross-attention by the module's name within its layer (encoder_attn, EncDecAttention, cross_attn…): self-attention may have
    the same class. And marks self-attention that sees all tokens without saying so."""
    for name, module in model.named_modules():
        if uses_interface(type(module)):
            within_layer = re.split(r"\.\d+(?=\.|$)", name)[-1]
            named = re.search(r"cross|encoder_attn|enc(oder)?_?dec", within_layer, re.IGNORECASE) is not None
            elsewhere = named or "CrossAttention" in type(module).__name__ or bool(getattr(module, "is_cross_attention", False))
            module.__dict__["attends_elsewhere"] = elsewhere
            module.__dict__["sees_all"] = not hasattr(module, "is_causal") and makes_bidirectional_masks(type(module))


@cache
def makes_bidirectional_masks(kind: type[nn.Module]) -> bool:
    """Are all masks of the file of this class bidirectional (Splinter, ALIGN)? Then None for a mask means that every token is seen."""
    try:
        source = inspect.getsource(inspect.getmodule(kind) or kind)
    except (OSError, TypeError):
        return False
    return "create_bidirectional_mask(" in source and "causal_mask(" not in source


def find_self_attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The self-attention modules that go through the attention interface, by name."""
    mark_roles(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ShapedSelfAttention) or (uses_interface(type(module)) and not is_cross_attention(module))
    }


@cache
def uses_interface(kind: type[nn.Module]) -> bool:
    """Does the forward of this class call the attention interface?"""
    try:
        return kind.__name__ != "Attend" and "get_interface(" in inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return False


@cache
def bypasses_interface(kind: type[nn.Module]) -> bool:
    """Does this class compute its softmax itself, whatever attention implementation is set? Cross-attention may: it stays plain."""
    if "Attention" not in kind.__name__ or re.search("CrossAttention|AttentionPool", kind.__name__) or uses_interface(kind):
        return False
    try:  # what a class inherits is its own code too
        source = "".join(inspect.getsource(base) for base in kind.__mro__ if base.__module__.startswith("transformers."))
    except (OSError, TypeError):
        return False
    return re.search("softmax|scaled_dot_product_attention", source, re.IGNORECASE) is not None and "get_interface(" not in source


@cache
def merges_sequences(kind: type[nn.Module]) -> bool:
    """Does it attend to its own and to another model's tokens in one softmax (T5Gemma 2's decoder)? Its queries are not among its keys."""
    return "merged_attention_mask" in inspect.signature(kind.forward).parameters


def find_other_softmax(module: nn.Module) -> str:
    """The attribute by which a module changes the softmax, which it gives as one of UNSUPPORTED: capped logits or sinks; else empty."""
    return next((name for name in ("attn_logit_softcapping", "sinks") if getattr(module, name, None) is not None), "")


def adds_to_masks(config: object) -> bool:
    """Do the model's attention modules add a mask of their own to the causal one (Doge)?

    With None for the causal mask, theirs would be taken for the whole mask, and tokens would see what comes after them.
    """
    return getattr(config, "keep_window_size", None) is not None


def mask_forward(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    **named: Any,
) -> Tensor | None:
    """Boolean masks, as for `sdpa`. A mask of padding alone is [batch, 1, 1, keys], for which the centring is a masked mean.

    In a causal mask the last query attends to its own key even at padding: `find_query_positions` reads the positions off that entry.
    """
    check_columns(named.get("attention_mask"), q_offset, q_length, kv_offset + kv_length)
    if adds_to_masks(named.get("config")):
        named["allow_is_causal_skip"] = False
    mask = sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, **named)  # pyright: ignore[reportArgumentType]
    if mask is None:
        return None
    if mask_function is bidirectional_mask_function:
        return mask[..., :1, :]
    if q_length == kv_length:
        return mask
    queries, keys = torch.arange(q_length, device=mask.device), torch.arange(kv_length, device=mask.device) + kv_offset
    return mask | (queries == q_length - 1)[:, None] & (keys == q_offset + q_length - 1)


def check_columns(mask: Any, seen: int | Tensor, queries: int, keys: int | Tensor) -> None:
    """Refuses a mask of padding, [batch, tokens], that does not fit. transformers takes missing columns for padding, and cuts others.

    A static cache is longer than its tokens, and tells their number by a tensor, which is not read.
    """
    if not isinstance(mask, Tensor):
        return
    if mask.ndim not in (2, 4):
        raise ValueError(f"attention_mask must be [batch, tokens] or [batch, 1, queries, tokens], got shape {tuple(mask.shape)}")
    known = mask.ndim == 2 and isinstance(seen, int) and isinstance(keys, int) and seen + queries == keys
    if known and mask.shape[-1] != keys:
        raise ValueError(f"attention_mask must have a column for each of the {keys} tokens, cached ones included, got {mask.shape[-1]}")


def _add_mask(bias: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """A position bias (T5) with -inf where the mask or causality forbids attention."""
    if causal:
        Q, K = bias.shape[-2:]
        mask = torch.arange(K, device=bias.device) <= torch.arange(K - Q, K, device=bias.device)[:, None]
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, mask_forward)
