"""What this architecture does at initialisation, beside each curve: predicted from its config, or measured on fresh copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from shaped.diagnosis.curves import Curves, list_curves
from shaped.diagnosis.observation import Observation, observe
from shaped.diagnosis.one_pass.losses import Loss
from shaped.diagnosis.reinitialised import make_fresh_copy

PREDICTED = {"correlation": "rho", "rank": "rank", "length": "length", "entropy": "entropy"}
"""Curves that `shaped.hf.predict` has, and their names there."""
FEW_TOKENS, MOST_TOKENS = 128, 512
"""Up to the first, four models are predicted for each copy that would be made; beyond the second a prediction takes longer than a copy."""


@dataclass(frozen=True)
class Band:
    """Of one curve: the smallest, the mean and the largest value over several initialisations."""

    low: list[float]
    mean: list[float]
    high: list[float]


@dataclass(frozen=True)
class Bands:
    stacks: dict[str, dict[str, Band]]
    """Stack → curve → band."""
    source: str
    """Where they come from, or why there are none, in words."""


def measure_bands(model: nn.Module, batch: Any, seen: Observation, *, loss: Loss | None, seeds: int, seed: int) -> Bands:
    """Bands of `seeds` initialisations. `predict` is asked first: it needs no copy of the model."""
    if not seeds:
        return Bands({}, "no band was asked for")
    model = getattr(model, "_orig_mod", model)
    return predict_bands(model, batch, seen, seeds=seeds, seed=seed) or copy_bands(model, batch, seen, loss=loss, seeds=seeds, seed=seed)


def predict_bands(model: nn.Module, batch: Any, seen: Observation, *, seeds: int, seed: int) -> Bands | None:
    """From the model's config, for the first sequence; None if `shaped.hf.predict` does not know this model or these tokens."""
    ids = find_ids(batch)
    config = getattr(model, "config", None)
    if ids is None or config is None or len(seen.stacks) != 1 or not find_spec("transformers") or not 2 <= len(ids) <= MOST_TOKENS:
        return None
    from shaped.hf import predict

    samples = seeds * (4 if len(ids) <= FEW_TOKENS else 1)
    try:
        found = predict(config, ids.cpu(), samples=samples, seed=seed, progress=False)
    except ValueError:  # another family, or an option that it does not know
        return None
    if len(found.entropy) != len(seen.stacks[0].layers):
        return None
    bands = {name: make_band(getattr(found, theirs).T.tolist()) for name, theirs in PREDICTED.items()}
    return Bands({seen.stacks[0].name: bands}, f"{samples} models predicted from the config (shaped.hf.predict), first sequence")


def copy_bands(model: nn.Module, batch: Any, seen: Observation, *, loss: Loss | None, seeds: int, seed: int) -> Bands:
    """From copies of the model with fresh weights, all curves."""
    curves: dict[str, list[Curves]] = {stack.name: [] for stack in seen.stacks}
    for number in range(seeds):
        try:
            fresh = make_fresh_copy(model, seed + number)
        except ValueError as error:
            return Bands({}, f"no band: {error}")
        for stack in observe(fresh, batch, loss).stacks:
            curves.setdefault(stack.name, []).append(list_curves(stack))
        del fresh  # before the next copy is made
    stacks = {stack: {name: make_band([one[name] for one in copies]) for name in copies[0]} for stack, copies in curves.items() if copies}
    return Bands(stacks, f"{seeds} copies with fresh weights")


def make_band(copies: list[list[float]]) -> Band:
    """Of [copies][stage]."""
    values = torch.tensor(copies, dtype=torch.float64)
    return Band(values.amin(0).tolist(), values.mean(0).tolist(), values.amax(0).tolist())


def find_ids(batch: Any) -> Tensor | None:
    """The ids of the first sequence, without padding."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor) or batch["input_ids"].ndim != 2:
        return None
    ids, mask = batch["input_ids"][0], batch.get("attention_mask")
    return ids[mask[0] != 0] if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape == batch["input_ids"].shape else ids
