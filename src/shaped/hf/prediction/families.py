"""The registry of families, and configs read from disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from shaped.files import check_entries, read_json
from shaped.hf.attention import NAME
from shaped.hf.prediction import decoders, encoders
from shaped.hf.prediction.parts import Network
from shaped.hf.prediction.shaped_models import describe_shaped
from shaped.hf.prediction.stock_shaping import read_shaping, shape_config, shape_network
from shaped.process import to_line

FAMILIES: dict[str, Callable[[Any, int], Network]] = {
    "bert": encoders.describe_bert,
    "gemma2": decoders.describe_gemma2,
    "gpt2": decoders.describe_gpt2,
    "gpt_neox": decoders.describe_gpt_neox,
    "llama": decoders.describe_llama,
    "mistral": decoders.describe_mistral,
    "modernbert": encoders.describe_modernbert,
    "olmo2": decoders.describe_olmo2,
    "qwen2": decoders.describe_qwen2,
    "qwen3": decoders.describe_qwen3,
    "roberta": encoders.describe_roberta,
    NAME: describe_shaped,
    "vit": encoders.describe_vit,
}
"""From a config and a number of tokens to the network, by model_type."""
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
"""Fields that a file must have: transformers would take those of another model for them."""


def describe_network(config: PreTrainedConfig, m: int) -> Network:
    """The network of a config with m tokens, with the attention that the config chooses."""
    describe = FAMILIES[check_family(config.model_type)]
    if config.model_type == NAME:
        check_attention(config)
        return describe(config, m)
    settings = read_shaping(config)
    network = describe(config, m)
    return network if settings is None else shape_network(network, settings)


def check_attention(config: PreTrainedConfig) -> None:
    """Refuses a model of this package that drops its shaping: the prediction would be of another model."""
    chosen = config._attn_implementation
    if getattr(config, "block", "") == "shaped" and chosen not in (None, NAME, "eager"):
        raise ValueError(
            f"attn_implementation must be {NAME!r} for a prediction of a shaped model, got {chosen!r}, which drops its shaping"
        )


def check_family(model_type: Any) -> str:
    if model_type not in FAMILIES:
        raise ValueError(f"model_type must be one of {', '.join(FAMILIES)}, got {model_type!r}")
    return model_type


def read_config(config: Any, shape: Any = None) -> PreTrainedConfig:
    """The config itself, or the one in a file or in a folder. Nothing is fetched from a network, and no code of a folder is run.

    With `shape` it is a copy, as `shaped.hf.shape(model, **shape)` would leave it.
    """
    if shape is not None:
        return shape_config(read_config(config), shape)
    if isinstance(config, PreTrainedConfig):
        return config
    if not isinstance(config, str | Path):
        raise ValueError(f"config must be a transformers config, a folder or a config.json, got {type(config).__name__}")
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        entries = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"config must be a folder with a config.json, or such a file, got {str(config)!r}") from None
    made = make_config(str(path), entries)
    made.name_or_path = os.path.abspath(config)  # "." has a name too; links keep theirs
    return made


def make_config(name: str, entries: dict[str, Any]) -> PreTrainedConfig:
    """The config of a JSON object, which is called `name` in errors."""
    model_type = check_entries(name, entries, model_type=str)["model_type"]
    kind = CONFIG_MAPPING[check_family(model_type)]
    for field in REQUIRED:
        if field not in entries and getattr(kind, "attribute_map", {}).get(field) not in entries:
            raise ValueError(f"{name} must have {field}, got a config without it")
    try:
        return kind.from_dict(entries)
    except Exception as error:  # transformers has several classes of errors for a field, some over many lines
        said = to_line(f"{error} {error.__cause__ or ''}")[:200]
        raise ValueError(f"{name} must be a config of {model_type}, got one that is not: {said}") from None
