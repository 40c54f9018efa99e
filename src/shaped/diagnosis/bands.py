"""What this architecture does at initialisation, beside each curve: predicted from its config, or measured on fresh copies."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from shaped.diagnosis.curves import Curves, list_curves
from shaped.diagnosis.memory import find_lack_of_copies
from shaped.diagnosis.observation import Observation, find_device, observe
from shaped.diagnosis.one_pass.flow import iterate_values
from shaped.diagnosis.one_pass.losses import Loss
from shaped.diagnosis.reinitialised import describe_drawing, draw_weights, make_fresh_copy
from shaped.nn.compiled import unwrap

PREDICTED = {"correlation": "rho", "rank": "rank", "length": "length", "entropy": "entropy"}
"""Curves that `shaped.hf.predict` has, and their names there."""
FEW_TOKENS, MOST_TOKENS = 128, 512
"""Up to the first, four models are predicted for each copy that would be made; beyond the second a prediction takes longer than a copy."""
HARMLESS = {"labels", "next_sentence_label", "use_cache", "return_dict", "output_attentions", "output_hidden_states"}
"""Arguments of transformers' models that leave the residual stream as it is."""
SEEDS = 8
"""Initialisations where the caller names no number."""
LONG = 2e11
"""Parameters times tokens, of all copies together, where the caller names no number and the model is on the CPU: about half a minute on
two cores (benchmarks/studies/diagnosis_cost.py). A number of seconds would make the result depend on what else runs."""


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


def measure_bands(model: nn.Module, batch: Any, seen: Observation, *, loss: Loss | None, seeds: int | None, seed: int) -> Bands:
    """Bands of `seeds` initialisations; None: SEEDS, and fewer copies of a large model. `predict` is asked first: it needs no copy."""
    if seeds == 0:
        return Bands({}, "no band was asked for")
    model = unwrap(model)
    predicted = predict_bands(model, batch, seen, seeds=seeds or SEEDS, seed=seed)
    return predicted or copy_bands(model, batch, seen, loss=loss, seeds=seeds or choose_copies(model, batch, seen), seed=seed)


def choose_copies(model: nn.Module, batch: Any, seen: Observation) -> int:
    """SEEDS, or as many as LONG allows, but at least two."""
    if find_device(model).type != "cpu":
        return SEEDS
    first = next((value for value in iterate_values(batch) if isinstance(value, Tensor) and value.ndim >= 2), None)
    longest = max(stack.entering.tokens for stack in seen.stacks)
    tokens = longest if first is None else math.prod(first.shape[:2]) if first.ndim < 4 else len(first) * longest
    work = sum(parameter.numel() for parameter in model.parameters()) * max(1, tokens)
    return max(2, min(SEEDS, int(LONG / work)))


def predict_bands(model: nn.Module, batch: Any, seen: Observation, *, seeds: int, seed: int) -> Bands | None:
    """From the model's config, for the first sequence; None if `shaped.hf.predict` does not know this model or this batch."""
    config = getattr(model, "config", None)
    ids = find_ids(batch, has_segments=hasattr(config, "type_vocab_size"))
    if ids is None or config is None or len(seen.stacks) != 1 or not find_spec("transformers") or not 2 <= len(ids) <= MOST_TOKENS:
        return None
    if getattr(config, "attn_logit_softcapping", None) and getattr(config, "_attn_implementation", "") == "sdpa":
        return None  # transformers' fused attention leaves the soft cap out, so this model does not do what its config says
    from shaped.hf import predict
    from shaped.hf.shaping import has_gains_of_config

    if not has_gains_of_config(model, config) or not is_made_by_config(model, config):
        return None  # copies keep what was changed by hand; the config does not know it
    samples = seeds * (4 if len(ids) <= FEW_TOKENS else 1)
    try:
        found = predict(config, ids.cpu(), samples=samples, seed=seed, progress=False)
    except ValueError:  # another family, or an option that it does not know
        return None
    if len(found.entropy) != len(seen.stacks[0].layers):
        return None
    bands = {name: make_band(getattr(found, theirs).T.tolist()) for name, theirs in PREDICTED.items()}
    return Bands({seen.stacks[0].name: bands}, f"{samples} models predicted from the config (shaped.hf.predict), first sequence")


def is_made_by_config(model: nn.Module, config: Any) -> bool:
    """Is it of this package or of transformers, with the parts that its config asks for? Another model may have borrowed the config."""
    kind = type(model)
    if kind.__module__.partition(".")[0] not in ("shaped", "transformers"):
        return False
    try:
        with torch.device("meta"):
            usual: nn.Module = kind(copy.deepcopy(config))
    except Exception:  # transformers has several classes of errors
        return False
    return describe_parts(model) == describe_parts(usual)


def describe_parts(model: nn.Module) -> dict[str, Any]:
    """Class, options and sizes of each part by name. Gains of shaped attention are left out: they may have been added since."""
    from shaped.nn.modules import AttentionShaping

    def describe(part: nn.Module) -> tuple[Any, ...]:
        return type(part), part.extra_repr(), [(name, own.shape) for name, own in part.named_parameters(recurse=False)]

    return {name: describe(part) for name, part in model.named_modules() if not isinstance(part, AttentionShaping)}


def copy_bands(model: nn.Module, batch: Any, seen: Observation, *, loss: Loss | None, seeds: int, seed: int) -> Bands:
    """From copies of the model with fresh weights, all curves."""
    curves: dict[str, list[Curves]] = {stack.name: [] for stack in seen.stacks}
    if lack := find_lack_of_copies(model):
        return Bands({}, f"no band: {lack}")
    try:
        fresh = make_fresh_copy(model, seed)
    except ValueError as error:
        return Bands({}, f"no band: {error}")
    for number in range(seeds):
        if number:  # one copy for all: several would stay in memory until they are collected
            draw_weights(fresh, seed + number)
        for stack in observe(fresh, batch, loss).stacks:
            curves.setdefault(stack.name, []).append(list_curves(stack))
    stacks = {stack: {name: make_band([one[name] for one in copies]) for name in copies[0]} for stack, copies in curves.items() if copies}
    copies = f"{seeds} {'copy' if seeds == 1 else 'copies'} with fresh weights"
    return Bands(stacks, f"{copies}, {describe_drawing(model)}")


def make_band(copies: list[list[float]]) -> Band:
    """Of [copies][stage]."""
    values = torch.tensor(copies, dtype=torch.float64, device="cpu")
    return Band(values.amin(0).tolist(), values.mean(0).tolist(), values.amax(0).tolist())


def find_ids(batch: Any, *, has_segments: bool) -> Tensor | None:
    """The ids of the first sequence, without padding; None where a prediction from them is not one of this batch.

    That is so where the batch has more than ids, padding, segments of 0 and positions in order, or sequences of several lengths.
    `has_segments`: segments of 0 are what the model takes by itself. GPT-2 has none, and would add the embedding of token 0.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor) or batch["input_ids"].ndim != 2:
        return None
    given = {name: value for name, value in batch.items() if value is not None and name not in HARMLESS}
    ids, (count, m) = given.pop("input_ids").cpu(), batch["input_ids"].shape
    usual = {"attention_mask": torch.ones(1, m, device="cpu"), "position_ids": torch.arange(m, device="cpu")}
    usual |= {"token_type_ids": torch.zeros(1, m, device="cpu")} if has_segments else {}
    if not all(name in usual and isinstance(x, Tensor) and x.shape in ((m,), (1, m), (count, m)) for name, x in given.items()):
        return None
    values = {name: given.get(name, default).cpu().expand(count, m) for name, default in usual.items()}
    if bool(values.get("token_type_ids", torch.zeros(1, device="cpu")).any()):
        return None
    real = values["attention_mask"] != 0
    if bool((real.sum(-1) != real[0].sum()).any()):  # curves are means over all sequences, and short ones have other bands
        return None
    in_order = all(bool((places[kept].diff() == 1).all()) for places, kept in zip(values["position_ids"], real, strict=True))
    return ids[0, real[0]] if in_order else None
