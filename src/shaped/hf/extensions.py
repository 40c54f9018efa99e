"""What transformers has no hooks for: gains between a model's construction and the loading of its weights, and shaping that is saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.trainer_callback import CallbackHandler

from shaped.hf.attention import NAME, mark_roles
from shaped.hf.callbacks import DiagnosticsCallback
from shaped.hf.configuration import ShapedConfig
from shaped.hf.shaping import configs, install, refuse_if_ignored
from shaped.nn.schedules import Shapeable


def extend_transformers() -> None:
    """Once, however often it is called."""
    if hasattr(PreTrainedModel, "extended_by_shaped"):
        return
    for owner, name, extend in (
        (PreTrainedModel, "post_init", at_the_end_of_construction),
        (PreTrainedModel, "set_attn_implementation", in_every_part),
        (PreTrainedModel, "_initialize_weights", with_gains),
        (PreTrainedConfig, "to_dict", with_the_choice),
        (CallbackHandler, "add_callback", introducing_itself),
    ):
        stock = getattr(owner, name)
        setattr(owner, name, wraps(stock)(extend(stock)))
    for owner, name, extend in (
        (PreTrainedConfig, "from_dict", saying_what_is_dropped),
        (PreTrainedModel, "from_pretrained", saying_what_is_overridden),
        (PreTrainedModel, "_from_config", saying_what_is_overridden),
    ):
        stock = getattr(owner, name).__func__
        setattr(owner, name, classmethod(wraps(stock)(extend(stock))))
    allow_output_attentions()
    setattr(PreTrainedModel, "extended_by_shaped", True)  # noqa: B010 (as an assignment, pyright misses the attribute)


def at_the_end_of_construction(post_init: Callable[..., None]) -> Callable[..., None]:
    """Gains where the config asks for them, before weights are loaded; and no silent no-op."""

    def finished(self: PreTrainedModel) -> None:
        if getattr(self.config, "shaped", None):
            install(self)
        if self.config._attn_implementation == NAME and any("Attention" in type(module).__name__ for module in self.modules()):
            refuse_if_ignored(self)
        if is_dropped(self.config):
            warn_of(self.config._attn_implementation, self.config)
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
        before = [config for config in configs(self) if config._attn_implementation == NAME]
        set_attn_implementation(self, attn_implementation, *args, **kwargs)
        if before or NAME in by_part.values():  # other choices are not ours
            for config in configs(self):
                if attn_implementation == NAME or type(config) is type(self.config):
                    config._attn_implementation_internal = self.config._attn_implementation
        for config in before:
            if config._attn_implementation != NAME and (is_dropped(config) or not isinstance(config, ShapedConfig)):
                warn_of(config._attn_implementation, config)

    return chosen


def with_gains(initialise: Callable[..., None]) -> Callable[..., None]:
    """Gains that a checkpoint does not have start where they should; a stock model's own code does not know of them."""

    def initialised(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, Shapeable) and not getattr(module, "_is_hf_initialized", False):
            module.reset_parameters()  # transformers sees to it that what was loaded is left alone
        initialise(self, module, *args, **kwargs)

    return initialised


def with_the_choice(to_dict: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """transformers leaves the attention out of config.json. Another kernel for the same function may be left out; shaping may not."""

    def written(self: PreTrainedConfig) -> dict[str, Any]:
        output = to_dict(self)
        choice = shaped_parts(self)
        if choice is not None:
            output["attn_implementation"] = choice
        elif output.get("attn_implementation") == NAME:
            del output["attn_implementation"]
        return output

    return written


def shaped_parts(config: PreTrainedConfig) -> str | dict[str, Any] | None:
    """What `attn_implementation` must be for the same parts of a model to be shaped again; None if none are."""
    parts = {name: part for name in config.sub_configs if isinstance(part := getattr(config, name, None), PreTrainedConfig)}
    choices = {"": config._attn_implementation} | {name: shaped_parts(part) or part._attn_implementation for name, part in parts.items()}
    if all(choice == NAME for choice in choices.values()):
        return NAME
    return choices if any(choice == NAME or isinstance(choice, dict) for choice in choices.values()) else None


def saying_what_is_dropped(from_dict: Callable[..., Any]) -> Callable[..., Any]:
    """An explicit choice of another attention is honoured; that it is another function must be said."""

    def read(cls: type[PreTrainedConfig], config_dict: dict[str, Any], **kwargs: Any) -> Any:
        has_gains = config_dict.get("shaped") or issubclass(cls, ShapedConfig)  # the model itself then says it
        if drops(config_dict.get("attn_implementation"), kwargs) and not has_gains:
            warn_of(kwargs["attn_implementation"], cls)
        return from_dict(cls, config_dict, **kwargs)

    return read


def saying_what_is_overridden(load: Callable[..., Any]) -> Callable[..., Any]:
    """The same where the choice stands beside a config that was read before. One that `from_dict` has seen has it already."""

    def loaded(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config", args[0] if args else None)
        if isinstance(config, PreTrainedConfig):
            has_gains = getattr(config, "shaped", None) or isinstance(config, ShapedConfig)
            if drops(shaped_parts(config), kwargs) and not has_gains:
                warn_of(kwargs["attn_implementation"], config)
        return load(cls, *args, **kwargs)

    return loaded


def drops(before: Any, given: dict[str, Any]) -> bool:
    """Is another attention among the arguments than the shaped one before? None is one too: transformers then chooses."""
    return NAME in str(before) and "attn_implementation" in given and NAME not in str(given["attn_implementation"])


def is_dropped(config: PreTrainedConfig) -> bool:
    """Does the config speak of shaping that its attention does not have?"""
    if isinstance(config, ShapedConfig):
        return config.block == "shaped" and config._attn_implementation not in (NAME, "eager")
    return bool(getattr(config, "shaped", None)) and config._attn_implementation != NAME


def warn_of(choice: Any, config: PreTrainedConfig | type[PreTrainedConfig]) -> None:
    name = config.__name__ if isinstance(config, type) else type(config).__name__
    warnings.warn(
        f"attn_implementation={choice!r} drops the shaping of a model that was shaped ({name}): its attention is plain softmax, whatever "
        f"gains it has; leave the argument out, or give {NAME!r}, to keep the shaping",
        stacklevel=2,
    )


def allow_output_attentions() -> None:
    """`config.output_attentions = True` beside shaped attention, which can give its matrices. transformers allows it for "eager" alone."""
    stock, validate = PreTrainedConfig.output_attentions, PreTrainedConfig.validate_output_attentions

    def choose(self: PreTrainedConfig, value: bool) -> None:
        if self._attn_implementation == NAME:
            self._output_attentions = value
        else:
            stock.fset(self, value)  # pyright: ignore[reportOptionalCall]

    @wraps(validate)
    def validate_output_attentions(self: PreTrainedConfig) -> None:
        if self._attn_implementation != NAME:
            validate(self)

    PreTrainedConfig.output_attentions = property(stock.fget, choose)  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedConfig.validate_output_attentions = validate_output_attentions
    kinds = [PreTrainedConfig]
    while kinds:  # each class keeps a list of its validators from when it was made
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        found: list[Any] = getattr(kind, "__class_validators__", [])
        found[:] = [validate_output_attentions if validator is validate else validator for validator in found]


def introducing_itself(add_callback: Callable[..., None]) -> Callable[..., None]:
    """A callback that logs must know the others, which write logs: Trainer tells it only about the model."""

    def added(self: CallbackHandler, callback: Any) -> None:
        add_callback(self, callback)
        if isinstance(self.callbacks[-1], DiagnosticsCallback):
            self.callbacks[-1].beside = self.callbacks

    return added
