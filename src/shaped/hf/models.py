"""The shaped Transformer as Hugging Face models: encoder and decoder, masked and causal language models."""

from __future__ import annotations

import copy
import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from shaped.hf.attention import NAME, attention_forward, check_columns
from shaped.hf.configuration import ShapedConfig
from shaped.nn.activations import ACTIVATIONS
from shaped.nn.blocks import BLOCKS, NormBlock, ShapedTransformerBlock
from shaped.nn.initialisations import INITIALISATIONS
from shaped.nn.modules import QKGains, ShapedFeedForwardBlock, ShapedSelfAttention, init_normal, make_linear
from shaped.nn.norms import NORMS, DyT
from shaped.nn.rotary import Rotation, make_rotation
from shaped.nn.schedules import Shapeable


class Attend(nn.Module):
    """Updates the cache of a layer and calls the attention implementation of the config."""

    def __init__(self, config: ShapedConfig, layer: int):
        super().__init__()
        self.config, self.layer = config, layer

    def forward(
        self,
        attention: ShapedSelfAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        cache: Cache | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        # "eager" means, as in transformers, the model's own attention with its matrices. For shaped blocks it is shaped.
        chosen = self.config._attn_implementation or NAME
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(chosen, attention_forward)
        dropout = attention.dropout if self.training else 0.0
        if chosen == "eager" or self.config.output_attentions:
            kwargs["output_attentions"] = chosen == "eager" or kwargs.get("output_attentions", True)
        return interface(attention, q, k, v, mask, dropout=dropout, scaling=attention.scale, **kwargs)


class ShapedLayer(GradientCheckpointingLayer):
    def __init__(self, config: ShapedConfig, layer: int):
        super().__init__()
        self.block, self.attend = make_block(config), Attend(config, layer)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        rotation: Rotation | None = None,
        **kwargs: Any,
    ) -> Tensor:
        def attend(attention: ShapedSelfAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            return self.attend(attention, q, k, v, mask, past_key_values, **kwargs)[0].transpose(1, 2)

        return self.block(x, mask, attend, rotation=rotation)


def make_block(config: ShapedConfig) -> ShapedTransformerBlock | NormBlock:
    shaped, schedule = config.block == "shaped", config.shaping()
    has_gains = "gains" in BLOCKS[config.block].parts
    attention = ShapedSelfAttention(
        config.hidden_size,
        config.num_attention_heads,
        tau0=config.tau0 if has_gains else None,
        causal=config.is_decoder,
        dropout=config.attention_dropout,
        schedule=schedule,
        shaped=shaped,
        qk_norm=config.qk_norm,
        qk_gain=config.qk_gain,
    )
    activation = ACTIVATIONS[config.activation].from_config(config.c_minus)
    feedforward = ShapedFeedForwardBlock(
        config.hidden_size, config.intermediate_size, schedule=schedule, shaped=shaped, activation=activation
    )
    if has_gains:
        return ShapedTransformerBlock(attention, feedforward, config.gamma, config.train_gains, config.gamma_feedforward)
    INITIALISATIONS[config.init].apply(attention, feedforward, config.num_hidden_layers)
    return NormBlock(attention, feedforward, "post" if config.block == "postln" else "pre", lambda width: make_norm(config))


def make_norm(config: ShapedConfig) -> nn.Module:
    """A norm of the tokens' features: DyT in a model of such blocks, the config's `norm` else."""
    if config.block == "dyt":
        return DyT(config.hidden_size, config.dyt_alpha)
    return NORMS[config.norm].make(config.hidden_size)


RESETTABLE = (Shapeable, ShapedTransformerBlock, QKGains, nn.LayerNorm, nn.RMSNorm, DyT)


class ShapedPreTrainedModel(PreTrainedModel):
    config: ShapedConfig
    config_class = ShapedConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ShapedLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": ShapedLayer, "attentions": Attend}

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """The default is shaped attention, also for a model that is part of a larger one."""
        return super().get_correct_attn_implementation(requested_attention or NAME, is_init_check)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialises a module as its constructor does. transformers skips weights that were loaded from a checkpoint."""
        if isinstance(module, RESETTABLE):
            module.reset_parameters()
        elif isinstance(module, (nn.Linear, nn.Embedding)):  # without `std`: a head or table that was resized for more tokens
            usual = self.config.choose_head_std() if isinstance(module, nn.Linear) else self.config.choose_table_std()
            nn.init.normal_(module.weight, std=getattr(module, "std", usual))


def make_table(rows: int, columns: int, std: float) -> nn.Embedding:
    """An embedding whose entries start as N(0, std²)."""
    return init_normal(nn.Embedding(rows, columns, device="meta"), std)


class Embedding(nn.Module):
    """Tokens (+ learned positions) (+ token types). Their sum has variance 1: the theory's V starts with a unit diagonal."""

    def __init__(self, config: ShapedConfig):
        super().__init__()
        std = config.choose_table_std()
        self.tokens = make_table(config.vocab_size, config.hidden_size, std)
        self.positions = make_table(config.max_position_embeddings, config.hidden_size, std) if config.positions == "learned" else None
        self.types = make_table(config.type_vocab_size, config.hidden_size, std) if config.type_vocab_size else None
        self.norm = make_norm(config) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x: Tensor, position_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """For embeddings of the tokens, [batch, m, n]."""
        if self.positions is not None:
            x = x + self.positions(position_ids)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(position_ids) if token_type_ids is None else token_type_ids)
        return self.dropout(x if self.norm is None else self.norm(x))


class ShapedModel(ShapedPreTrainedModel):
    """The stack of blocks on an embedding, without a head."""

    def __init__(self, config: ShapedConfig):
        super().__init__(config)
        self.embedding = Embedding(config)
        self.layers = nn.ModuleList(ShapedLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = make_norm(config) if config.block in ("preln", "dyt") else None
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding.add_module("tokens", value)

    def rotate(self, position_ids: Tensor) -> Rotation | None:
        """The rotation of queries and keys at these positions, [batch or 1, m]; None if the positions are learned."""
        if self.config.positions == "learned":
            return None
        return make_rotation(position_ids, self.config.hidden_size // self.config.num_attention_heads, self.config.rope_base)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids or inputs_embeds must be given, and not both, got " + ("none" if input_ids is None else "both"))
        x = self.embedding.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        if past_key_values is None or isinstance(past_key_values, DynamicCache):  # masks of static caches may be as long as the cache
            check_columns(attention_mask, seen, x.shape[1], seen + x.shape[1])
        # Before a cache is made: with one transformers does not look for packed sequences, which then see one another.
        if self.config.is_decoder:
            mask = create_causal_mask(self.config, x, attention_mask, past_key_values, position_ids)
        else:
            mask = create_bidirectional_mask(self.config, x, attention_mask)
        if self.config.is_decoder and use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if self.config.positions == "learned":
            _check_positions(position_ids, seen + x.shape[1], self.config.max_position_embeddings)
        if position_ids is None:
            position_ids = (torch.arange(x.shape[1], device=x.device) + seen)[None]
        x, rotation = self.embedding(x, position_ids, token_type_ids), self.rotate(position_ids)
        past = past_key_values if self.config.is_decoder else None
        for layer in self.layers:
            x = layer(x, mask, past_key_values=past, rotation=rotation, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=x if self.norm is None else self.norm(x), past_key_values=past_key_values)


def _check_positions(position_ids: Tensor | None, tokens: int | Tensor, most: int) -> None:
    """Refuses positions out of range. Packed sequences may have more tokens than positions.

    Reading positions from a GPU synchronises, so they are read there only if there are too many tokens.
    """
    many = isinstance(tokens, int) and tokens > most
    if position_ids is None and many:
        raise ValueError(f"input_ids must have at most {most} tokens, got {tokens}")
    if position_ids is None or torch.compiler.is_compiling() or not (position_ids.is_cpu or (many and position_ids.is_cuda)):
        return
    low, high = (int(position) for position in position_ids.aminmax()) if position_ids.numel() else (0, 0)
    if low < 0 or high >= most:
        raise ValueError(f"position_ids must be from 0 to {most - 1}, as max_position_embeddings has it, got {low if low < 0 else high}")


class ShapedLanguageModel(ShapedPreTrainedModel):
    """A stack with an output matrix. The subclass decides whether it is causal; it copies a config that says otherwise."""

    causal: ClassVar[bool]
    _tied_weights_keys = {"head.weight": "model.embedding.tokens.weight"}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Trainer's label smoothing shifts the labels only of classes that are listed as causal, by their names."""
        super().__init_subclass__(**kwargs)
        if cls.causal:
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[f"{NAME} {cls.__name__}"] = cls.__name__

    def __init__(self, config: ShapedConfig):
        if config.is_decoder is not self.causal:
            if config.architectures:  # of a saved model
                kind, saved = "causal" if self.causal else "bidirectional", config.architectures[0]
                warnings.warn(
                    f"{type(self).__name__} has {kind} attention, the saved {saved} had not: with its weights it is another function, and "
                    "has to be trained",
                    stacklevel=2,
                )
            config = copy.deepcopy(config)
            config.is_decoder = self.causal
        super().__init__(config)
        self.loss_type = "ForCausalLM" if self.causal else "ForMaskedLM"  # transformers guesses it from the name of the class
        self.model, self.head = ShapedModel(config), make_linear(config.hidden_size, config.vocab_size, config.choose_head_std())
        # The entries of a tied matrix start as the embedding's, about sqrt(n) times too large for an output matrix.
        self.head_scale = config.choose_head_std() / config.choose_table_std() if config.tie_word_embeddings else 1.0
        self.post_init()

    def logits(self, x: Tensor) -> Any:
        """The logits of tokens [..., n]."""
        return self.head(self.scale_for_head(x))

    def scale_for_head(self, x: Tensor) -> Tensor:
        """The tokens that the output matrix gets. A tied matrix is scaled, so that logits start as with entries of `head_std`."""
        return x if self.head_scale == 1.0 else self.head_scale * x

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.head = new_embeddings

    def _loss(self, logits: Tensor, labels: Tensor, kwargs: dict[str, Any]) -> Any:
        """Trainer passes `num_items_in_batch`, the count for the mean over accumulated batches, and `shift_labels`, labels that are already
        shifted, if it splits sequences."""
        given = {name: kwargs[name] for name in ("num_items_in_batch", "shift_labels") if name in kwargs}
        return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **given)


class ShapedForMaskedLM(ShapedLanguageModel):
    """An encoder that predicts masked tokens."""

    causal = False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """`labels`: the original tokens at the masked places, -100 elsewhere. (Trainer drops columns that forward does not name.)"""
        outputs = self.model(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.logits(outputs.last_hidden_state)
        loss = None if labels is None else self._loss(logits, labels, kwargs)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions)


class ShapedForCausalLM(ShapedLanguageModel, GenerationMixin):
    """A decoder that predicts the next token, and generates."""

    causal = True

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """`labels`: the tokens themselves. They are shifted here, unless `shift_labels` is given too."""
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.logits(outputs.last_hidden_state[:, kept])
        loss = None if labels is None else self._loss(logits, labels, kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
