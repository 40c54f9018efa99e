"""`shape`: gives a stock Hugging Face model shaped attention. Its gains are saved and loaded with the model."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shaped.checks import SINGLE, check_bool, finite, positive, quote
from shaped.hf.attention import (
    NAME,
    adds_to_masks,
    bypasses_interface,
    find_other_softmax,
    find_self_attentions,
    merges_sequences,
)
from shaped.hf.configuration import ShapedConfig
from shaped.nn import blocks
from shaped.nn.modules import AttentionShaping, has_gains

Model = TypeVar("Model", bound=PreTrainedModel)
CHOOSE = "choose a model that goes through the attention interface of transformers, such as BERT, ModernBERT, GPT-2 or Llama"


def shape(
    model: Model,
    *,
    tau0: float | None = None,
    learn: bool = False,
    gamma1: float = 1.0,
    gamma2: float = 1.0,
    gamma: float = 1.0,
) -> Model:
    r"""Gives every self-attention of a stock model the shape $\gamma(\gamma_1 I + \text{softmax} - \gamma_2\,\text{softmax}(B))$, in place.

    The gains become part of the model: `save_pretrained` writes them. `from_pretrained` of the same class or of an Auto class reads them
    and restores shaped attention, if `shaped.hf` is imported. Cross-attention does not change. Calling it again replaces the gains.

    Args:
        model: any model that goes through the attention interface of transformers.
        tau0: None, the default, keeps the model's own scaling: a trained model keeps its logits, and `vanilla` can restore the stock
            model. A number also divides the logits by $\tau_0\sqrt{n}$, as in the theory (Eq. shaped-attention).
        learn: train the gains. If not, they are buffers, which a `ShapingCallback` with `Recover` may anneal to 0.
        gamma1, gamma2: the initial gains.
        gamma: the weight of the attention branch (Eq. shaped_transformer). It multiplies the attention's output and is not trained.
    """
    _refuse_strangers(model, "shape")
    if isinstance(model.config, ShapedConfig):
        raise ValueError(f"model must be a stock model, got {type(model).__name__}, which has its shape from its ShapedConfig")
    instead_of = (getattr(model.config, "shaped", None) or {}).get("instead_of")
    settings = check_settings(tau0=tau0, learn=learn, gamma1=gamma1, gamma2=gamma2, gamma=gamma)
    settings |= {"instead_of": instead_of or choose_plain_attention(model)}
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("model must have its weights in memory before it is shaped, got parameters on the meta device")
    refuse_if_ignored(model)
    for module in find_self_attentions(model).values():
        module.register_module("shaping", None)
    for config in copy_configs(model):
        config.shaped = settings
    model.set_attn_implementation(NAME)
    install_gains(model)
    return model


def check_settings(
    tau0: float | None = None, learn: bool = False, gamma1: float = 1.0, gamma2: float = 1.0, gamma: float = 1.0
) -> dict[str, Any]:
    """The arguments of `shape`, checked, as a config keeps them. The defaults are what `attn_implementation="shaped"` alone does."""
    return {
        "tau0": None if tau0 is None else positive("tau0", tau0, SINGLE),
        "learn": check_bool("learn", learn),
        "gamma1": finite("gamma1", gamma1, SINGLE),
        "gamma2": finite("gamma2", gamma2, SINGLE),
        "gamma": positive("gamma", gamma, SINGLE),
    }


def read_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings in a config, checked: its file may have been written by hand. Configs of earlier versions have no gamma."""
    return read_arguments("shaped", getattr(config, "shaped", None), "instead_of")


def read_arguments(name: str, given: Any, *more: str) -> dict[str, Any]:
    """Arguments of `shape`, checked, with defaults for the others. What it does not know is refused; `more` are entries without effect."""
    known = inspect.signature(check_settings).parameters
    unknown = [key for key in given if key not in (*known, *more)] if isinstance(given, Mapping) else [given]
    if unknown:
        raise ValueError(f"{name} must have the arguments of shaped.hf.shape, {', '.join(known)}, got {quote(unknown[0])}")
    return check_settings(**{key: value for key, value in given.items() if key in known})


def find_temperature(tau0: float | None, n: int) -> float:
    r"""What the logits are multiplied by, beside the model's own scaling: $1/(\tau_0\sqrt{n})$ (Eq. shaped-attention), 1 for None."""
    return 1.0 if tau0 is None else 1.0 / (tau0 * math.sqrt(n))


def vanilla(model: Model) -> Model:
    """A copy without the shaping, with the same outputs. The shaping must be 0 (`Recover`). Like `shaped.nn.vanilla`, with the config.

    Its attention is that of before `shape`; "eager" for UMT5 and Doge, whose decoders are causal only there (transformers 5.17).
    """
    _refuse_strangers(model, "vanilla")
    settings = getattr(model.config, "shaped", None)
    if isinstance(model.config, ShapedConfig):
        if model.config.block != "shaped":
            raise ValueError(f"model must have shaped blocks, got {model.config.block}")
        model = blocks.vanilla(model)
        model.config.block = "vanilla"
        return model
    if not settings:
        raise ValueError(f"model must have been shaped by shaped.hf.shape, got a {type(model).__name__} that was not")
    plain, settings = settings.get("instead_of", "eager"), read_settings(model.config)
    if settings["tau0"] is not None:
        raise ValueError(f"model must have been shaped with tau0=None, its own scaling, to be plain again, got {settings['tau0']}")
    if settings["gamma"] != 1.0:
        raise ValueError(f"model must have been shaped with gamma=1, a branch of full weight, to be plain again, got {settings['gamma']}")
    model = blocks.vanilla(model)
    plain = "eager" if has_silent_decoder(model) else plain
    for config in list_configs(model):
        config.__dict__.pop("shaped", None)
        config._attn_implementation_internal = plain
    return model


def _refuse_strangers(model: object, name: str) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model must be a Hugging Face model for shaped.hf.{name}, got {type(model).__name__}")


def install_gains(model: PreTrainedModel) -> None:
    """Adds the gains of its config to every self-attention of a model. Existing gains stay."""
    settings = read_settings(model.config)
    for module in find_self_attentions(model).values():
        if not has_gains(module):
            like = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), torch.empty(0))
            with like.device:  # from_pretrained makes a model on the meta device, but some weights (DiffLlama) are made on the CPU
                shaping = AttentionShaping(settings["gamma1"], settings["gamma2"], settings["learn"])
            module.add_module("shaping", shaping.to(like.dtype))
        module.__dict__["shaped_temperature"] = find_temperature(settings["tau0"], find_width(module, model))
        module.__dict__["shaped_branch"] = settings["gamma"]


def has_gains_of_config(model: nn.Module, config: PreTrainedConfig) -> bool:
    """Does every self-attention of a stock model start with the gains of its config? Not if some were replaced or taken away by hand."""
    if getattr(config, "_attn_implementation", None) != NAME or isinstance(config, ShapedConfig):
        return True
    attentions = find_self_attentions(model).values()
    if not getattr(config, "shaped", None):
        return not any(hasattr(module, "shaping") for module in attentions)
    settings = read_settings(config)
    expected = {(settings["gamma1"], settings["gamma2"])}
    return all({part.start for part in module.modules() if isinstance(part, AttentionShaping)} == expected for module in attentions)


def choose_plain_attention(model: PreTrainedModel) -> str:
    """The attention that `vanilla` restores: the model's own, or the default of transformers if that is shaped."""
    chosen = model.config._attn_implementation
    return chosen if chosen not in (None, NAME) else model.get_correct_attn_implementation(None)


def has_silent_decoder(model: PreTrainedModel) -> bool:
    """Has it a decoder that does not say that it is causal (UMT5), or that hides it behind a mask of its own (Doge)?

    Then a fused kernel without the causal mask lets it see what comes after.
    """
    if any(adds_to_masks(config) for config in list_configs(model)):
        return True
    parts = find_self_attentions(model).values()
    return any(getattr(part, "is_decoder", False) is True and getattr(part, "is_causal", True) is False for part in parts)


def find_width(module: nn.Module, model: PreTrainedModel) -> int:
    """n, the input width of the queries."""
    projection = next((part for part in module.modules() if isinstance(part, nn.Linear)), None)
    return getattr(module, "config", model.config).hidden_size if projection is None else projection.in_features


def list_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The model's config and those of its parts; some, such as T5's, are copies."""
    found = {id(config): config for module in model.modules() if isinstance(config := getattr(module, "config", None), PreTrainedConfig)}
    return list(found.values())


def copy_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Replaces the model's configs by copies and returns them: other models may share the originals."""
    before = list_configs(model)
    copies = dict(zip(map(id, before), copy.deepcopy(before), strict=True))
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if id(value) in copies:
                module.__dict__[name] = copies[id(value)]
    return list(copies.values())


def refuse_if_ignored(model: PreTrainedModel) -> None:
    """Refuses models on which the attention interface has no effect, wholly or in part, and those with another softmax."""
    name = type(model).__name__
    own = sorted({type(module).__name__ for module in model.modules() if bypasses_interface(type(module))})
    attentions = find_self_attentions(model).values()
    if own or not attentions:
        place = f"{', '.join(own)} of {name}" if own else f"{name}, in which no self-attention goes through the attention interface"
        raise ValueError(f"attn_implementation='{NAME}' has no effect on {place}; {CHOOSE}")
    for module in attentions:
        if merges_sequences(type(module)):
            raise ValueError(
                f"attn_implementation='{NAME}' must be for self-attention, got {type(module).__name__} of {name}, one softmax over the "
                f"tokens of two sequences; {CHOOSE}"
            )
        if other := find_other_softmax(module):
            raise ValueError(f"{other} must be None for attn_implementation='{NAME}', got one in {type(module).__name__} of {name}")
