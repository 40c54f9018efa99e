"""`shape`: a stock Hugging Face model with shaped attention, whose gains are saved and loaded with it."""

from __future__ import annotations

import math
from functools import wraps
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shaped.checks import finite, positive
from shaped.hf.attention import NAME, goes_through_the_interface, is_cross_attention
from shaped.nn import blocks
from shaped.nn.modules import AttentionShaping

Model = TypeVar("Model", bound=PreTrainedModel)


def shape(model: Model, *, tau0: float | None = 1.0, learn: bool = False, gamma1: float = 1.0, gamma2: float = 1.0) -> Model:
    r"""Gives every self-attention of a stock model the shape $\gamma_1 I + \text{softmax} - \gamma_2\,\text{softmax}(B)$, in place.

    The gains belong to the model from then on: `save_pretrained` writes them, and `from_pretrained` of the same class, or of an Auto class,
    reads them and goes on with shaped attention, once `shaped.hf` is imported. Cross-attention stays as it is.

    Args:
        model: any model that goes through the attention interface of transformers.
        tau0: the logits are divided by $\tau_0\sqrt{n}$ beside the model's own scaling (Eq. shaped-attention); None keeps the model's
            own scaling, for a model that is trained already.
        learn: train the gains. If not, they are buffers, which a `ShapingCallback` with `Recover` may take to 0.
        gamma1, gamma2: where the gains start.
    """
    settings = {
        "tau0": None if tau0 is None else positive("tau0", tau0),
        "learn": bool(learn),
        "gamma1": finite("gamma1", gamma1),
        "gamma2": finite("gamma2", gamma2),
    }
    refuse_if_ignored(model)
    model.config.shaped = settings
    if not install(model):
        raise ValueError(f"model must have self-attention that goes through the attention interface, got {type(model).__name__}")
    _choose(model, NAME)
    return model


def vanilla(model: Model) -> Model:
    """A copy without the shaping, which must have gone to 0 (`Recover`), with the same outputs: `shaped.nn.vanilla`, and its config too."""
    config = model.config
    settings = getattr(config, "shaped", None)
    if settings and settings["tau0"] is not None:
        raise ValueError(f"model must have been shaped with tau0=None, its own scaling, to be plain again, got {settings['tau0']}")
    model = blocks.vanilla(model)
    if settings:
        for sub in _configs(model):
            sub.__dict__.pop("shaped", None)
            sub.__dict__.pop("attn_implementation", None)
        _choose(model, "sdpa")
    else:
        model.config.block = "vanilla"
    return model


def _choose(model: PreTrainedModel, implementation: str) -> None:
    model.set_attn_implementation(implementation)
    for config in _configs(model):  # some models, such as T5, give their parts copies of the config, which the line above passes over
        config._attn_implementation_internal = implementation


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    found = {id(config): config for module in model.modules() if isinstance(config := getattr(module, "config", None), PreTrainedConfig)}
    return list(found.values())


def install(model: PreTrainedModel) -> int:
    """Gives the self-attention of a model the gains that its config speaks of; those that have them keep them. How many there are."""
    settings, count = model.config.shaped, 0
    for module in model.modules():
        if goes_through_the_interface(type(module)) and not is_cross_attention(module):
            count += 1
            if not isinstance(getattr(module, "shaping", None), AttentionShaping):
                shaping = AttentionShaping(settings["gamma1"], settings["gamma2"], settings["learn"])
                like = next(module.parameters())
                module.add_module("shaping", shaping.to(device=like.device, dtype=like.dtype))
            if settings["tau0"] is not None:
                width = getattr(module, "config", model.config).hidden_size
                module.shaped_temperature = 1.0 / (settings["tau0"] * math.sqrt(width))
    if count:
        model.config.attn_implementation = NAME  # written to config.json, where a load without an explicit choice finds it
    return count


def refuse_if_ignored(model: PreTrainedModel) -> None:
    """An error for models with attention code of their own, where the choice would otherwise have no effect."""
    ignores = not model._can_set_attn_implementation()
    if ignores or not any(goes_through_the_interface(type(module)) for module in model.modules()):
        raise ValueError(
            f"attn_implementation='{NAME}' has no effect on {type(model).__name__}, which does not go through the attention interface of "
            "transformers; choose a model that does, such as BERT, ModernBERT, GPT-2 or Llama"
        )


def _with_shaping(post_init: Any) -> Any:
    """What every model does at the end of its construction, and before it: gains where the config asks for them, and no silent no-op."""

    @wraps(post_init)
    def finished(self: PreTrainedModel) -> None:
        if getattr(self.config, "shaped", None):
            install(self)
        if self.config._attn_implementation == NAME and any("Attention" in type(module).__name__ for module in self.modules()):
            refuse_if_ignored(self)
        post_init(self)

    return finished


def extend_transformers() -> None:
    """transformers has no hook between a model's construction and the loading of its weights, where gains must come to be."""
    if not hasattr(PreTrainedModel.post_init, "__wrapped__"):
        PreTrainedModel.post_init = _with_shaping(PreTrainedModel.post_init)


def shaped_attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The self-attention modules that hand their queries and keys to the interface, by name."""
    return {name: module for name, module in model.named_modules() if getattr(module, "shaping", None) is not None}
