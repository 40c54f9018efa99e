"""What the families share: fields of a config, checked, and the parts of a block that are made from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shaped.checks import check_bool, positive, whole_number
from shaped.hf.prediction.embeddings import Embedding
from shaped.hf.prediction.heads import Head
from shaped.layers import FeedForwardBranch, Norm, ResidualBlock, Weights
from shaped.nn.functional import rotary_frequencies

ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu2",
    "tanh": "tanh",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}
"""transformers' names of activations, and ours."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LAYER_TYPES = ("full_attention", "sliding_attention")
Read = TypeVar("Read")


Block = tuple[ResidualBlock, ...]
"""A block of a model: attention, then feed-forward, or both in one."""


@dataclass(frozen=True, eq=False)
class Network:
    """A model at initialisation: what enters, the blocks of its residual stream, and what makes logits of it."""

    width: int
    embedding: Embedding
    blocks: tuple[Block, ...]
    head: Head


@dataclass(frozen=True)
class Sizes:
    """Fields that every family has, whatever it calls them."""

    n: int
    depth: int
    heads: int
    std: float

    @classmethod
    def read(cls, config: PreTrainedConfig) -> Sizes:
        n, depth, heads = (read_whole(config, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        return cls(n, depth, heads, read_positive(config, "initializer_range"))

    @property
    def head_width(self) -> int:
        if self.n % self.heads:
            raise ValueError(f"num_attention_heads must divide hidden_size, {self.n}, got {self.heads}")
        return self.n // self.heads


def read_whole(config: PreTrainedConfig, name: str, least: int = 1) -> int:
    return whole_number(name, getattr(config, name, None), least)


def read_positive(config: PreTrainedConfig, name: str) -> float:
    return positive(name, getattr(config, name, None))


def read_optional(read: Callable[[PreTrainedConfig, str], Read], config: PreTrainedConfig, name: str) -> Read | None:
    """The field by `read`; None where the config has none."""
    return None if getattr(config, name, None) is None else read(config, name)


def refuse(config: PreTrainedConfig, *names: str) -> None:
    """Refuses a config in which one of these fields is set: what it stands for is not in the prediction."""
    for name in names:
        if getattr(config, name, None):
            raise ValueError(f"{name} must not be set for a prediction, which has no such part, got {getattr(config, name)!r}")


def check_causal(config: PreTrainedConfig) -> None:
    """Refuses a decoder whose causal mask is switched off: transformers then lets tokens see those after them."""
    if not getattr(config, "is_causal", True):
        raise ValueError(f"is_causal must be left out or true for a decoder, got {config.is_causal!r}")


def read_padding(config: PreTrainedConfig) -> int | None:
    """The id of padding, whose row of the embedding is 0. As in torch, -1 is the last id."""
    given, vocabulary = getattr(config, "pad_token_id", None), read_whole(config, "vocab_size")
    return None if given is None else whole_number("pad_token_id", given, -vocabulary, vocabulary - 1) % vocabulary


def read_activation(config: PreTrainedConfig, name: str) -> str:
    given = getattr(config, name, None)
    if not isinstance(given, str) or given not in ACTIVATIONS:
        raise ValueError(f"{name} must be one of {', '.join(ACTIVATIONS)}, got {given!r}")
    return ACTIVATIONS[given]


def read_window(config: PreTrainedConfig, layer: int) -> int | None:
    """The sliding window of a layer, for configs with `layer_types`."""
    types: Any = getattr(config, "layer_types", None)
    if not isinstance(types, list | tuple) or len(types) < layer + 1 or types[layer] not in LAYER_TYPES:
        got = types[layer] if isinstance(types, list | tuple) and len(types) > layer else types
        raise ValueError(f"layer_types must be {' or '.join(LAYER_TYPES)} for each layer, got {got!r} for layer {layer}")
    return None if types[layer] == "full_attention" else read_whole(config, "sliding_window")


def make_projections(std: float, out: float | None = None) -> dict[str, Any]:
    """The weights of an AttentionBranch; `out` is the standard deviation of the last matrix, `std` by default."""
    return {name: Weights(std) for name in ("query", "key", "value")} | {"output": Weights(std if out is None else out)}


def gated_feedforward(hidden: int, activation: str, std: float, outer: float | None = None) -> FeedForwardBranch:
    return FeedForwardBranch(hidden, Weights(std), Weights(std if outer is None else outer), activation, gated=True)


def read_rope(config: PreTrainedConfig, head_width: int, layer_type: str | None = None) -> tuple[tuple[float, ...], float]:
    """The frequencies of the rotated features, and the factor of the logits that some types of RoPE bring.

    Fewer frequencies than half the head's width rotate only the first features.
    """
    rope: Any = getattr(config, "rope_parameters", None)
    rope = rope.get(layer_type) if layer_type is not None and isinstance(rope, dict) else rope
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters must have the entries rope_type and rope_theta, got {rope!r}")
    kind, share = rope.get("rope_type", "default"), positive("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_parameters must have a rope_type among {', '.join(ROPE_TYPES)}, got {kind!r}")
    base = positive("rope_theta", rope.get("rope_theta"))
    rotated = int(head_width * share)
    if share == 1.0 and head_width % 2:
        raise ValueError(f"head_dim must be even, as RoPE turns pairs of features, got {head_width}")
    if not 0 < rotated + rotated % 2 <= head_width or (share != 1.0 and config.model_type != "gpt_neox"):
        raise ValueError(f"partial_rotary_factor must be 1, or for GPT-NeoX give pairs of {head_width} features, got {share!r}")
    if kind == "default":
        return tuple(rotary_frequencies(rotated, base).tolist()), 1.0
    given = {"layer_type": layer_type} if layer_type is not None else {}
    try:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **given)
    except (KeyError, TypeError) as error:
        raise ValueError(f"rope_parameters must have the entries of rope_type {kind!r}, got none for {error}") from None
    if factor != 1.0 and rotated != head_width:
        raise ValueError(f"rope_parameters must rotate all features with the factor {factor:g} of its rope_type, got {share!r} of them")
    return tuple(frequencies.double().tolist()), factor**2


def make_head(config: PreTrainedConfig, std: float, norm: Norm | None, **more: Any) -> Head:
    """The output matrix of a language model; `more` are other fields of the head."""
    tied = check_bool("tie_word_embeddings", getattr(config, "tie_word_embeddings", False))
    return Head(read_whole(config, "vocab_size"), std, norm, tied=tied, **more)


def scale_depth(std: float, depth: int) -> float:
    """GPT-2's initialisation of the matrices that end a residual branch: two branches a block."""
    return std / math.sqrt(2.0 * depth)
