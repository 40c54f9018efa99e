"""Patches of transformers, for what it has no hooks for: gains in stock models, and shaping that is saved with a model.

Each function below takes a method of transformers and returns the one that replaces it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.trainer_callback import CallbackHandler

from shaped.hf.attention import NAME, find_self_attentions, mark_roles
from shaped.hf.callbacks import LayerLogCallback
from shaped.hf.configuration import ShapedConfig
from shaped.hf.shaping import CHOOSE, install_gains, list_configs, refuse_if_ignored
from shaped.nn.schedules import Shapeable


def extend_transformers() -> None:
    """Patches transformers. A second call does nothing."""
    if hasattr(PreTrainedModel, "extended_by_shaped"):
        return
    for owner, name, extend in (
        (PreTrainedModel, "post_init", patch_post_init),
        (PreTrainedModel, "set_attn_implementation", patch_set_attn_implementation),
        (PreTrainedModel, "_initialize_weights", patch_initialize_weights),
        (PreTrainedConfig, "to_dict", patch_to_dict),
        (CallbackHandler, "add_callback", patch_add_callback),
    ):
        stock = getattr(owner, name)
        setattr(owner, name, wraps(stock)(extend(stock)))
    for owner, name, extend in (
        (PreTrainedConfig, "from_dict", patch_from_dict),
        (PreTrainedModel, "from_pretrained", patch_loading),
        (PreTrainedModel, "_from_config", patch_loading),
    ):
        stock = getattr(owner, name).__func__
        setattr(owner, name, classmethod(wraps(stock)(extend(stock))))
    allow_output_attentions()
    setattr(PreTrainedModel, "extended_by_shaped", True)  # noqa: B010 (as an assignment, pyright misses the attribute)


def patch_post_init(post_init: Callable[..., None]) -> Callable[..., None]:
    """Adds the gains that the config asks for, before weights are loaded. Refuses a model that would ignore the shaping."""

    def post_init_and_shape(self: PreTrainedModel) -> None:
        if getattr(self.config, "shaped", None):
            install_gains(self)
        refuse_if_unshaped(self)
        parts = (part for part in self.modules() if isinstance(part, PreTrainedModel) and part is not self)
        if drops_shaping(self.config) and not any(drops_shaping(part.config) for part in parts):  # else a part has warned already
            warn_of_plain_attention(self.config._attn_implementation, self.config)
        mark_roles(self)  # whatever its attention is now: its config may be set to "shaped" later
        post_init(self)

    return post_init_and_shape


def refuse_if_unshaped(model: PreTrainedModel) -> None:
    """Refuses a model, just built, that asks for shaped attention and would not have it.

    A part that has no attention, such as a convolutional backbone, is for the model around it to judge: another part may have some.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config._attn_implementation == NAME]
    if not parts:
        return
    if parts[0] is model and any("Attention" in type(module).__name__ for module in model.modules()):
        refuse_if_ignored(model)
    elif not is_being_built_into(model) and not any(map(find_self_attentions, parts)):
        refuse_if_ignored(parts[0])


def is_being_built_into(part: PreTrainedModel) -> bool:
    """Does the constructor of another model call that of this one? Only the stack tells: a part knows nothing of the model around it."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(owner := frame.f_locals.get("self"), PreTrainedModel) and owner is not part:
            return True
        frame = frame.f_back
    return False


def patch_set_attn_implementation(set_attn_implementation: Callable[..., None]) -> Callable[..., None]:
    """Sets the attention of all parts. transformers skips parts whose config is a copy (T5), and only warns if nothing changes."""

    def set_everywhere(self: PreTrainedModel, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        by_part = attn_implementation if isinstance(attn_implementation, dict) else {"": attn_implementation}
        refuse_unknown_parts(self.config, attn_implementation)
        for name in (name for name, choice in by_part.items() if choice == NAME):
            config = getattr(self.config, name, None) if name else self.config
            for part in (part for part in self.modules() if isinstance(part, PreTrainedModel) and part.config is config):
                refuse_if_ignored(part)
        mark_roles(self)
        before = [config for config in list_configs(self) if config._attn_implementation == NAME]
        set_attn_implementation(self, attn_implementation, *args, **kwargs)
        if before or NAME in by_part.values():  # a change between two other implementations is none of our business
            for config in list_configs(self):
                if attn_implementation == NAME or type(config) is type(self.config):
                    config._attn_implementation_internal = self.config._attn_implementation
        for config in before:
            if config._attn_implementation != NAME and (drops_shaping(config) or not isinstance(config, ShapedConfig)):
                warn_of_plain_attention(config._attn_implementation, config)

    return set_everywhere


def patch_initialize_weights(initialise: Callable[..., None]) -> Callable[..., None]:
    """Initialises gains that a checkpoint lacks. A stock model's own code does not know them."""

    def initialise_gains(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, Shapeable) and not getattr(module, "_is_hf_initialized", False):
            module.reset_parameters()  # transformers protects loaded weights from this
        initialise(self, module, *args, **kwargs)

    return initialise_gains


def patch_to_dict(to_dict: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Writes "shaped" into config.json. transformers leaves out the attention implementation, but shaping is another function."""

    def to_dict_with_attention(self: PreTrainedConfig) -> dict[str, Any]:
        output = to_dict(self)
        choice = shaped_parts(self)
        if choice is not None:
            output["attn_implementation"] = choice
        elif output.get("attn_implementation") == NAME:
            del output["attn_implementation"]
        return output

    return to_dict_with_attention


def shaped_parts(config: PreTrainedConfig) -> str | dict[str, Any] | None:
    """The `attn_implementation` that shapes the same parts of a model again; None if no part is shaped."""
    parts = {name: part for name in config.sub_configs if isinstance(part := getattr(config, name, None), PreTrainedConfig)}
    choices = {"": config._attn_implementation} | {name: shaped_parts(part) or part._attn_implementation for name, part in parts.items()}
    if all(choice == NAME for choice in choices.values()):
        return NAME
    return choices if any(choice == NAME or isinstance(choice, dict) for choice in choices.values()) else None


def patch_from_dict(from_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Warns where another attention is asked for than the saved one: it is used, but it is another function."""

    def from_dict_with_warning(cls: type[PreTrainedConfig], config_dict: dict[str, Any], **kwargs: Any) -> Any:
        has_gains = config_dict.get("shaped") or issubclass(cls, ShapedConfig)  # then the model warns at its construction
        if overrides_shaping(config_dict.get("attn_implementation"), kwargs) and not has_gains:
            warn_of_plain_attention(kwargs["attn_implementation"], cls)
        return from_dict(cls, config_dict, **kwargs)

    return from_dict_with_warning


def patch_loading(load: Callable[..., Any]) -> Callable[..., Any]:
    """The same warning where the caller passes a config object, which `from_dict` does not see; and the refusal of some old models."""

    def load_with_warning(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config", args[0] if args else None)
        if isinstance(config, PreTrainedConfig):
            has_gains = getattr(config, "shaped", None) or isinstance(config, ShapedConfig)
            if overrides_shaping(shaped_parts(config), kwargs) and not has_gains:
                warn_of_plain_attention(kwargs["attn_implementation"], config)
            refuse_unknown_parts(config, kwargs.get("attn_implementation"))
        try:
            loaded = load(cls, *args, **kwargs)
            model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info there is more
            refuse_unknown_parts(model.config, kwargs.get("attn_implementation"))
            return loaded
        except KeyError as error:
            if error.args != (NAME,):
                raise
            raise ValueError(  # old models (Falcon, GPT-J) look it up in their constructor, before `post_init`
                f"attn_implementation='{NAME}' is unknown to {cls.__name__}, which has a table of attentions of its own; {CHOOSE}"
            ) from None

    return load_with_warning


def refuse_unknown_parts(config: PreTrainedConfig, choice: Any) -> None:
    """Of a choice for each part, transformers passes over the names that it does not know."""
    for name in choice if isinstance(choice, dict) else ():
        if NAME in str(choice[name]) and name not in ("", *config.sub_configs):
            known = ", ".join(["''", *config.sub_configs])
            raise ValueError(f"attn_implementation must have names of parts of {type(config).__name__}, {known}, got {name!r}")


def overrides_shaping(before: Any, given: dict[str, Any]) -> bool:
    """Was the attention shaped before, and do the arguments ask for another? None counts too: transformers then chooses one."""
    return NAME in str(before) and "attn_implementation" in given and NAME not in str(given["attn_implementation"])


def drops_shaping(config: PreTrainedConfig) -> bool:
    """Does the config ask for shaping while its attention implementation is a plain one?"""
    if isinstance(config, ShapedConfig):
        return config.block == "shaped" and config._attn_implementation not in (NAME, "eager")
    return bool(getattr(config, "shaped", None)) and config._attn_implementation != NAME


def warn_of_plain_attention(choice: Any, config: PreTrainedConfig | type[PreTrainedConfig]) -> None:
    name = config.__name__ if isinstance(config, type) else type(config).__name__
    warnings.warn(
        f"attn_implementation={choice!r} drops the shaping of a model that was shaped ({name}): its attention is plain softmax, whatever "
        f"gains it has; leave the argument out, or give {NAME!r}, to keep the shaping",
        stacklevel=2,
    )


def allow_output_attentions() -> None:
    """Allows `config.output_attentions = True` with shaped attention, which can return its matrices. transformers requires "eager"."""
    stock, validate = PreTrainedConfig.output_attentions, PreTrainedConfig.validate_output_attentions

    def set_output_attentions(self: PreTrainedConfig, value: bool) -> None:
        if self._attn_implementation == NAME:
            self._output_attentions = value
        else:
            stock.fset(self, value)  # pyright: ignore[reportOptionalCall]

    @wraps(validate)
    def validate_output_attentions(self: PreTrainedConfig) -> None:
        if self._attn_implementation != NAME:
            validate(self)

    PreTrainedConfig.output_attentions = property(stock.fget, set_output_attentions)  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedConfig.validate_output_attentions = validate_output_attentions
    kinds = [PreTrainedConfig]
    while kinds:  # each class has copied the list of its validators
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        found: list[Any] = getattr(kind, "__class_validators__", [])
        found[:] = [validate_output_attentions if validator is validate else validator for validator in found]


def patch_add_callback(add_callback: Callable[..., None]) -> Callable[..., None]:
    """Gives a `LayerLogCallback` the list of all callbacks, through which it logs. Trainer gives it only the model."""

    def add_and_introduce(self: CallbackHandler, callback: Any) -> None:
        add_callback(self, callback)
        if isinstance(self.callbacks[-1], LayerLogCallback):
            self.callbacks[-1].beside = self.callbacks

    return add_and_introduce
