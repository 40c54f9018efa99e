"""Stock models with shaped attention: `attn_implementation="shaped"`, and the gains of `shaped.hf.shape`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from shaped.checks import quote
from shaped.hf.attention import NAME
from shaped.hf.configuration import ShapedConfig
from shaped.hf.prediction.parts import Block, Network
from shaped.hf.shaping import check_settings, find_temperature
from shaped.layers import AttentionBranch, ResidualBlock
from shaped.layers.branches import Branch

ARGUMENTS = ("tau0", "learn", "gamma1", "gamma2", "gamma")
"""Of `shaped.hf.shape`, which leaves them in a config."""


def shape_config(config: PreTrainedConfig, shape: Any) -> PreTrainedConfig:
    """A copy of a stock config, as `shaped.hf.shape(model, **shape)` would leave it in the model."""
    if isinstance(config, ShapedConfig):
        raise ValueError(f"shape must be None for a {type(config).__name__}, which has its own shape, got {quote(shape)}")
    settings = read_settings("shape", shape)
    config = copy.deepcopy(config)
    config._attn_implementation, config.shaped = NAME, settings
    return config


def read_shaping(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The settings of a config whose attention is shaped; the defaults of `shape` if it has none; None for plain attention."""
    settings, chosen = getattr(config, "shaped", None), config._attn_implementation
    if not settings:
        return check_settings() if chosen == NAME else None
    if chosen != NAME:
        raise ValueError(
            f"attn_implementation must be {NAME!r} for a prediction of a model that was shaped, got {chosen!r}, which drops its shaping"
        )
    given = read_settings("shaped", settings, "instead_of")
    missing = [name for name in ARGUMENTS if name not in settings and name != "gamma"]  # configs of earlier versions have no gamma
    if missing:
        raise ValueError(f"shaped must have {missing[0]}, as shaped.hf.shape writes it, got {settings!r}")
    return given


def read_settings(name: str, given: Any, *more: str) -> dict[str, Any]:
    """Refuses what `shape` does not know: it may be a part of the model that the prediction would leave out. `more` does not shape."""
    unknown = [key for key in given if key not in (*ARGUMENTS, *more)] if isinstance(given, Mapping) else [given]
    if unknown:
        raise ValueError(f"{name} must have the arguments of shaped.hf.shape, {', '.join(ARGUMENTS)}, got {quote(unknown[0])}")
    return check_settings(**{key: value for key, value in given.items() if key in ARGUMENTS})


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
