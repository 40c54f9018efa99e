"""`shape`: a stock Hugging Face model with shaped attention, whose gains are saved and loaded with it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shaped.checks import finite, positive
from shaped.hf.attention import NAME, has_attention_of_its_own, mark_roles, self_attentions
from shaped.hf.configuration import ShapedConfig
from shaped.nn import blocks
from shaped.nn.modules import AttentionShaping
from shaped.nn.schedules import Shapeable

Model = TypeVar("Model", bound=PreTrainedModel)


def shape(model: Model, *, tau0: float | None = 1.0, learn: bool = False, gamma1: float = 1.0, gamma2: float = 1.0) -> Model:
    r"""Gives every self-attention of a stock model the shape $\gamma_1 I + \text{softmax} - \gamma_2\,\text{softmax}(B)$, in place.

    The gains belong to the model from then on: `save_pretrained` writes them, and `from_pretrained` of the same class, or of an Auto class,
    reads them and goes on with shaped attention, once `shaped.hf` is imported. Cross-attention stays as it is. A model that is shaped
    already is shaped anew.

    Args:
        model: any model that goes through the attention interface of transformers.
        tau0: the logits are divided by $\tau_0\sqrt{n}$ beside the model's own scaling (Eq. shaped-attention); None keeps the model's
            own scaling, for a model that is trained already.
        learn: train the gains. If not, they are buffers, which a `ShapingCallback` with `Recover` may take to 0.
        gamma1, gamma2: where the gains start.
    """
    _refuse_strangers(model, "shape")
    if isinstance(model.config, ShapedConfig):
        raise ValueError(f"model must be a stock model, got {type(model).__name__}, which has its shape from its ShapedConfig")
    before = getattr(model.config, "shaped", None)
    settings = {
        "tau0": None if tau0 is None else positive("tau0", tau0),
        "learn": bool(learn),
        "gamma1": finite("gamma1", gamma1),
        "gamma2": finite("gamma2", gamma2),
        "instead_of": before["instead_of"] if before else model.config._attn_implementation,
    }
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("model must have its weights in memory before it is shaped, got parameters on the meta device")
    refuse_if_ignored(model)
    for module in self_attentions(model).values():
        module.register_module("shaping", None)
    for config in own_configs(model):
        config.shaped = settings
    model.set_attn_implementation(NAME)
    install(model)
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
    for config in configs(model):
        for name in ("shaped", "attn_implementation"):
            config.__dict__.pop(name, None)
        config._attn_implementation_internal = settings["instead_of"]
    return model


def _refuse_strangers(model: object, name: str) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model must be a Hugging Face model for shaped.hf.{name}, got {type(model).__name__}")


def install(model: PreTrainedModel) -> None:
    """Gives the self-attention of a model the gains that its config speaks of; those that have them keep them."""
    settings = model.config.shaped
    for module in self_attentions(model).values():
        if not isinstance(getattr(module, "shaping", None), AttentionShaping):
            shaping = AttentionShaping(settings["gamma1"], settings["gamma2"], settings["learn"])
            like = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), None)
            module.add_module("shaping", shaping if like is None else shaping.to(device=like.device, dtype=like.dtype))
        factor = 1.0 if settings["tau0"] is None else settings["tau0"] * math.sqrt(width_of(module, model))
        module.__dict__["shaped_temperature"] = 1.0 / factor
    for config in configs(model):
        if config._attn_implementation == NAME:
            config.attn_implementation = NAME  # written to config.json, where a load without an explicit choice finds it


def width_of(module: nn.Module, model: PreTrainedModel) -> int:
    """n, the features that queries are made of."""
    projection = next((part for part in module.modules() if isinstance(part, nn.Linear)), None)
    return getattr(module, "config", model.config).hidden_size if projection is None else projection.in_features


def configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The model's config and those of its parts; some, such as T5's, are copies."""
    found = {id(config): config for module in model.modules() if isinstance(config := getattr(module, "config", None), PreTrainedConfig)}
    return list(found.values())


def own_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Those configs, replaced by copies: other models may be made of the ones that this model was made of."""
    before = configs(model)
    copies = dict(zip(map(id, before), copy.deepcopy(before), strict=True))
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if id(value) in copies:
                module.__dict__[name] = copies[id(value)]
    return list(copies.values())


def refuse_if_ignored(model: PreTrainedModel) -> None:
    """An error for models with attention code of their own, where the choice would otherwise have no effect."""
    own = sorted({type(module).__name__ for module in model.modules() if has_attention_of_its_own(type(module))})
    if own or not self_attentions(model):
        raise ValueError(
            f"attn_implementation='{NAME}' has no effect on {', '.join(own) or 'the modules'} of {type(model).__name__}, which do not go "
            "through the attention interface of transformers; choose a model that does, such as BERT, ModernBERT, GPT-2 or Llama"
        )


def at_the_end_of_construction(post_init: Callable[..., None]) -> Callable[..., None]:
    """Gains where the config asks for them, before weights are loaded; and no silent no-op."""

    def finished(self: PreTrainedModel) -> None:
        if getattr(self.config, "shaped", None):
            install(self)
        if self.config._attn_implementation == NAME and any("Attention" in type(module).__name__ for module in self.modules()):
            refuse_if_ignored(self)
        mark_roles(self)  # whatever attention it has now: another may be chosen in its config
        post_init(self)

    return finished


def in_every_part(set_attn_implementation: Callable[..., None]) -> Callable[..., None]:
    """transformers passes over parts whose config is a copy of the model's own (T5), and only warns where nothing is changed."""

    def chosen(self: PreTrainedModel, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        by_part = attn_implementation if isinstance(attn_implementation, dict) else {"": attn_implementation}
        for name in (name for name, choice in by_part.items() if choice == NAME):
            config = getattr(self.config, name, None) if name else self.config
            for part in (part for part in self.modules() if isinstance(part, PreTrainedModel) and part.config is config):
                refuse_if_ignored(part)
        mark_roles(self)
        concerned = NAME in (*by_part.values(), *(config._attn_implementation for config in configs(self)))  # other choices are not ours
        set_attn_implementation(self, attn_implementation, *args, **kwargs)
        for config in configs(self) if concerned else ():
            if attn_implementation == NAME or type(config) is type(self.config):
                config._attn_implementation_internal = self.config._attn_implementation

    return chosen


def with_gains(initialise: Callable[..., None]) -> Callable[..., None]:
    """Gains that a checkpoint does not have start where they should; a stock model's own code does not know of them."""

    def initialised(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, Shapeable) and not getattr(module, "_is_hf_initialized", False):
            module.reset_parameters()  # transformers sees to it that what was loaded is left alone
        initialise(self, module, *args, **kwargs)

    return initialised


def extend_transformers() -> None:
    """transformers has no hooks between a model's construction and the loading of its weights, where gains must come to be."""
    extensions = {
        "post_init": at_the_end_of_construction,
        "set_attn_implementation": in_every_part,
        "_initialize_weights": with_gains,
    }
    for name, extend in extensions.items():
        stock = getattr(PreTrainedModel, name)
        if not hasattr(stock, "extended_by_shaped"):
            extended = wraps(stock)(extend(stock))
            extended.__dict__["extended_by_shaped"] = True
            setattr(PreTrainedModel, name, extended)
