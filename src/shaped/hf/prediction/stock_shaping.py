"""Stock models with shaped attention: `attn_implementation="shaped"`, and the gains of `shaped.hf.shape`."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from shaped.checks import quote
from shaped.hf.attention import NAME
from shaped.hf.configuration import ShapedConfig
from shaped.hf.prediction.parts import Block, Network
from shaped.hf.shaping import check_settings, find_temperature, read_arguments, read_settings
from shaped.layers import AttentionBranch, ResidualBlock
from shaped.layers.branches import Branch


def shape_config(config: PreTrainedConfig, shape: Any) -> PreTrainedConfig:
    """A copy of a stock config, as `shaped.hf.shape(model, **shape)` would leave it in the model."""
    if isinstance(config, ShapedConfig):
        raise ValueError(f"shape must be None for a {type(config).__name__}, which has its own shape, got {quote(shape)}")
    settings = read_arguments("shape", shape)
    config = copy.deepcopy(config)
    config._attn_implementation, config.shaped = NAME, settings
    return config


def read_shaping(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The settings of a config whose attention is shaped; the defaults of `shape` if it has none; None for plain attention."""
    chosen = config._attn_implementation
    if not getattr(config, "shaped", None):
        return check_settings() if chosen == NAME else None
    if chosen != NAME:
        raise ValueError(
            f"attn_implementation must be {NAME!r} for a prediction of a model that was shaped, got {chosen!r}, which drops its shaping"
        )
    return read_settings(config)


def shape_network(network: Network, settings: dict[str, Any]) -> Network:
    """The network with every attention shaped (Eq. shaped-attention-train)."""
    temperature = find_temperature(settings["tau0"], network.width)
    gains = {name: settings[name] for name in ("gamma1", "gamma2", "gamma")}

    def shape_branch(branch: Branch) -> Branch:
        if not isinstance(branch, AttentionBranch):
            return branch
        if branch.softcap is not None:
            raise ValueError(f"attn_logit_softcapping must be None for shaped attention, which has no soft cap, got {branch.softcap}")
        return replace(branch, scale=branch.factor * temperature, **gains)

    def shape_layer(layer: ResidualBlock) -> ResidualBlock:
        return replace(layer, branches=tuple(shape_branch(branch) for branch, _ in layer.pairs))

    made: dict[int, Block] = {}  # blocks that are one object stay one: gradients are prepared once for each
    for block in network.blocks:
        if id(block) not in made:
            made[id(block)] = tuple(map(shape_layer, block))
    return replace(network, blocks=tuple(made[id(block)] for block in network.blocks))
