"""`shape`: a stock Hugging Face model with shaped attention, whose gains are saved and loaded with it."""

from __future__ import annotations

import copy
import math
from typing import TypeVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shaped.checks import SINGLE, finite, positive
from shaped.hf.attention import NAME, bypasses_interface, find_self_attentions
from shaped.hf.configuration import ShapedConfig
from shaped.nn import blocks
from shaped.nn.modules import AttentionShaping, has_gains

Model = TypeVar("Model", bound=PreTrainedModel)


def shape(model: Model, *, tau0: float | None = None, learn: bool = False, gamma1: float = 1.0, gamma2: float = 1.0) -> Model:
    r"""Gives every self-attention of a stock model the shape $\gamma_1 I + \text{softmax} - \gamma_2\,\text{softmax}(B)$, in place.

    The gains belong to the model from then on: `save_pretrained` writes them, and `from_pretrained` of the same class, or of an Auto class,
    reads them and goes on with shaped attention, once `shaped.hf` is imported. Cross-attention stays as it is. A model that is shaped
    already is shaped anew.

    Args:
        model: any model that goes through the attention interface of transformers.
        tau0: None, the default, keeps the model's own scaling: a trained model goes on from its own logits, and `vanilla` can give the
            stock model back. A number divides the logits by $\tau_0\sqrt{n}$ beside that scaling, as the theory has it (Eq.
            shaped-attention).
        learn: train the gains. If not, they are buffers, which a `ShapingCallback` with `Recover` may take to 0.
        gamma1, gamma2: where the gains start.
    """
    _refuse_strangers(model, "shape")
    if isinstance(model.config, ShapedConfig):
        raise ValueError(f"model must be a stock model, got {type(model).__name__}, which has its shape from its ShapedConfig")
    before = getattr(model.config, "shaped", None)
    settings = {
        "tau0": None if tau0 is None else positive("tau0", tau0, SINGLE),
        "learn": bool(learn),
        "gamma1": finite("gamma1", gamma1, SINGLE),
        "gamma2": finite("gamma2", gamma2, SINGLE),
        "instead_of": before["instead_of"] if before else choose_plain_attention(model),
    }
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


def vanilla(model: Model) -> Model:
    """A copy without the shaping, which must have gone to 0 (`Recover`), with the same outputs: `shaped.nn.vanilla`, and its config too."""
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
    if settings["tau0"] is not None:
        raise ValueError(f"model must have been shaped with tau0=None, its own scaling, to be plain again, got {settings['tau0']}")
    model = blocks.vanilla(model)
    for config in list_configs(model):
        config.__dict__.pop("shaped", None)
        config._attn_implementation_internal = settings["instead_of"]
    return model


def _refuse_strangers(model: object, name: str) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model must be a Hugging Face model for shaped.hf.{name}, got {type(model).__name__}")


def install_gains(model: PreTrainedModel) -> None:
    """Gives the self-attention of a model the gains that its config speaks of; those that have them keep them."""
    settings = model.config.shaped
    for module in find_self_attentions(model).values():
        if not has_gains(module):
            shaping = AttentionShaping(settings["gamma1"], settings["gamma2"], settings["learn"])
            like = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), None)
            module.add_module("shaping", shaping if like is None else shaping.to(device=like.device, dtype=like.dtype))
        factor = 1.0 if settings["tau0"] is None else settings["tau0"] * math.sqrt(find_width(module, model))
        module.__dict__["shaped_temperature"] = 1.0 / factor


def choose_plain_attention(model: PreTrainedModel) -> str:
    """The attention that `vanilla` goes back to: the model's own, or, if that is shaped already, the one that transformers would choose."""
    chosen = model.config._attn_implementation
    return chosen if chosen not in (None, NAME) else model.get_correct_attn_implementation(None)


def find_width(module: nn.Module, model: PreTrainedModel) -> int:
    """n, the features that queries are made of."""
    projection = next((part for part in module.modules() if isinstance(part, nn.Linear)), None)
    return getattr(module, "config", model.config).hidden_size if projection is None else projection.in_features


def list_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The model's config and those of its parts; some, such as T5's, are copies."""
    found = {id(config): config for module in model.modules() if isinstance(config := getattr(module, "config", None), PreTrainedConfig)}
    return list(found.values())


def copy_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Those configs, replaced by copies: other models may be made of the ones that this model was made of."""
    before = list_configs(model)
    copies = dict(zip(map(id, before), copy.deepcopy(before), strict=True))
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if id(value) in copies:
                module.__dict__[name] = copies[id(value)]
    return list(copies.values())


def refuse_if_ignored(model: PreTrainedModel) -> None:
    """An error for models with attention code of their own, where the choice would otherwise have no effect."""
    own = sorted({type(module).__name__ for module in model.modules() if bypasses_interface(type(module))})
    if own or not find_self_attentions(model):
        raise ValueError(
            f"attn_implementation='{NAME}' has no effect on {', '.join(own) or 'the modules'} of {type(model).__name__}, which do not go "
            "through the attention interface of transformers; choose a model that does, such as BERT, ModernBERT, GPT-2 or Llama"
        )
