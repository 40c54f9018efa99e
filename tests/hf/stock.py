"""Tiny stock models with random weights, and shaped attention for them with the matrix written out."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    DogeConfig,
    DogeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.masking_utils import eager_mask

from shaped.hf import ShapedConfig, ShapedForCausalLM

VOCABULARY, PAD = 40, 1
LAYERS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}
TOKENS: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": None}


def bert(**kwargs):
    return BertForMaskedLM, BertConfig(**ENCODER, pad_token_id=PAD, **kwargs)


def roberta(**kwargs):
    return RobertaForMaskedLM, RobertaConfig(**ENCODER, pad_token_id=PAD, max_position_embeddings=40, **kwargs)


def modernbert(**kwargs):
    sizes = ENCODER | {"num_hidden_layers": 4}
    tokens: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    return ModernBertForMaskedLM, ModernBertConfig(**sizes, **tokens, local_attention=4, layer_types=LAYERS, **kwargs)


def gpt2(**kwargs):
    return GPT2LMHeadModel, GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=40, **TOKENS, **kwargs)


def gpt_bigcode(**kwargs):
    with warnings.catch_warnings():  # its module is compiled by what PyTorch warns of
        warnings.simplefilter("ignore", DeprecationWarning)
        from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 40}
    return GPTBigCodeForCausalLM, GPTBigCodeConfig(**sizes, **TOKENS, **kwargs)


def opt(**kwargs):
    sizes: dict[str, Any] = {name: size for name, size in ENCODER.items() if name != "intermediate_size"}
    return OPTForCausalLM, OPTConfig(**sizes, ffn_dim=24, word_embed_proj_dim=16, max_position_embeddings=40, **TOKENS, **kwargs)


def llama(**kwargs):
    return LlamaForCausalLM, LlamaConfig(**ENCODER, num_key_value_heads=2, **TOKENS, **kwargs)


def mistral(**kwargs):
    return MistralForCausalLM, MistralConfig(**ENCODER, num_key_value_heads=2, sliding_window=4, **TOKENS, **kwargs)


def doge(**kwargs):
    """Its attention adds a mask of its own to the causal one."""
    return DogeForCausalLM, DogeConfig(**ENCODER, num_key_value_heads=2, max_position_embeddings=40, **TOKENS, **kwargs)


def vit(**kwargs):
    sizes: dict[str, Any] = {name: value for name, value in ENCODER.items() if name != "vocab_size"}
    return ViTForImageClassification, ViTConfig(**sizes, image_size=8, patch_size=4, **kwargs)


def t5(**kwargs):
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    tokens: dict[str, Any] = {"pad_token_id": PAD, "decoder_start_token_id": PAD, "eos_token_id": None}
    return T5ForConditionalGeneration, T5Config(**sizes, **tokens, **kwargs)


def umt5(**kwargs):
    """Like T5, but its decoder's self-attention does not say that it is causal."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    tokens: dict[str, Any] = {"pad_token_id": PAD, "decoder_start_token_id": PAD, "eos_token_id": None}
    return UMT5ForConditionalGeneration, UMT5Config(**sizes, **tokens, **kwargs)


def bart(**kwargs):
    sizes: dict[str, Any] = {
        f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (("layers", 2), ("attention_heads", 4))
    }
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": VOCABULARY, "d_model": 16, "max_position_embeddings": 40}
    tokens: dict[str, Any] = {**TOKENS, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    return BartForConditionalGeneration, BartConfig(**sizes, **tokens, **kwargs)


def own(**kwargs):
    """None of the stock models: the package's decoder."""
    return ShapedForCausalLM, ShapedConfig(**ENCODER, **TOKENS, max_position_embeddings=40, gamma=0.4, **kwargs)


ENCODERS = {make.__name__: make for make in (bert, roberta, modernbert)}
DECODERS = {make.__name__: make for make in (gpt2, llama, mistral, doge)}
BOTH = {make.__name__: make for make in (t5, bart)}
IMAGES = {"vit": vit}
SILENT = {make.__name__: make for make in (gpt2, opt, gpt_bigcode)}
"""Decoders that do not hand `output_attentions` on to their attention."""


def made(make, implementation="shaped", seed=0, **kwargs) -> Any:
    """A model in evaluation mode. Weights are larger than usual, so that attention is far from uniform."""
    kind, config = make(**kwargs)
    torch.manual_seed(seed)
    model = kind._from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.4)
            elif "bias" in name:
                parameter.normal_(std=0.1)
    for module in model.modules():  # the reference is told by the call itself whether keys come from elsewhere
        elsewhere = {"key_value_states", "encoder_hidden_states"} & set(inspect.signature(module.forward).parameters)
        if elsewhere:
            module.register_forward_pre_hook(partial(_remember, next(iter(elsewhere))), with_kwargs=True)
    return model.double().eval()


def _remember(name, module, args, kwargs):
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    module.keys_from_elsewhere = bound.arguments.get(name) is not None


def reference_attention(module, query, key, value, attention_mask, scaling=None, is_causal=None, position_bias=None, **kwargs):
    """A = I + softmax(s + B) - softmax(B) by its definition; the queries are the last of the keys. Cross-attention is softmax alone."""
    for_each = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(for_each, 1), value.repeat_interleave(for_each, 1)
    Q, K = query.shape[-2], key.shape[-2]
    bias = torch.zeros(1, 1, Q, K, dtype=query.dtype) if attention_mask is None else attention_mask.clone()
    bias[bias < -1e30] = -torch.inf
    if position_bias is not None:
        bias = bias + position_bias
    nothing = (bias == -torch.inf).all(-1, keepdim=True)
    bias = bias.masked_fill(nothing, 0.0)
    A = torch.softmax(query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling) + bias, -1)
    if not getattr(module, "keys_from_elsewhere", False):
        A = A - torch.softmax(bias, -1) + torch.eye(K, dtype=query.dtype)[K - Q :]
    return (A.masked_fill(nothing, 0.0) @ value).transpose(1, 2).contiguous(), A


AttentionInterface.register("reference", reference_attention)
AttentionMaskInterface.register("reference", lambda *args, **kwargs: eager_mask(*args, **(kwargs | {"allow_is_causal_skip": False})))
