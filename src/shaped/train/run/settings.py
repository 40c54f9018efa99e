"""What a training run is made of: one typed class, which is also the command line's options and the TOML file's keys."""

from __future__ import annotations

import json
import re
import tomllib
import types
import typing
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from shaped.checks import finite, in_range, positive, whole_number
from shaped.files import read_text
from shaped.nn.activations import ACTIVATIONS

FLOAT32 = float(torch.finfo(torch.float32).max)
WIDEST, DEEPEST = 1 << 20, 4096  # with more, tensors have more entries than memory has addresses, and a model takes hours to build


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    least: int | None = None,
    most: int = (1 << 63) - 1,  # more fits into no tensor
    low: float | None = None,
) -> Any:
    """A field with its explanation and what it may be: one of `choices`, a whole number in [least, most], a number from `low` on."""
    return field(default=default, metadata={"help": help, "choices": choices, "least": least, "most": most, "low": low})


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"recover_steps": 4000, "tau0": 1.0, "steps": 100_000, "lr": 5e-4, "warmup": 4000, "decay": "none", "embedding_lr": 1.0}
}
"""Settings by one name. They stand before the defaults and behind every setting that is given."""


@dataclass(frozen=True)
class Settings:
    """A pre-training run. The defaults are the recipe that trained best so far; the preset "paper" has the paper's."""

    data: Path = option(MISSING, "Folder made by `shaped data prepare`.")
    out: Path = option(MISSING, "Folder of the run; if it holds one that was interrupted, that goes on.")

    model: str = option("shaped", "Blocks.", choices=("shaped", "preln", "postln", "vanilla"))
    schedule: str = option("recover", "What becomes of the shaping.", choices=("fixed", "learn", "recover"))
    recover_steps: int = option(1000, "Recover: steps in which the shaping goes to 0.", least=1)
    depth: int = option(18, "Blocks d.", least=1, most=DEEPEST)
    width: int = option(768, "Width n.", least=1, most=WIDEST)
    heads: int = option(8, "Attention heads; they must divide the width.", least=1, most=WIDEST)
    hidden: int | None = option(None, "Width inside the feed-forward layers; 4 times the width by default.", least=1, most=4 * WIDEST)
    gamma: float = option(0.1, "Where the gains of the residual branches start.", low=0.0)
    gamma_feedforward: float | None = option(None, "Where those of the feed-forward branches start, if not at gamma.", low=0.0)
    tau0: float = option(0.01, "Temperature, times sqrt(n n_k): width^-1/2 is the usual one, less is sharper at the start.", low=1e-6)
    c_minus: float = option(-1.0, "Shaped ReLU: the negative slope starts at 1 + c_minus/sqrt(n).")
    activation: str = option("relu", "Activation of the feed-forward layers.", choices=tuple(ACTIVATIONS))
    train_gains: bool = option(True, "Train lambda and gamma.")
    embedding_norm: bool = option(False, "LayerNorm on the embedding.")
    embedding_std: float | None = option(None, "Start of the embedding tables; by default tokens + positions have variance 1.", low=0.0)
    head_std: float | None = option(None, "Start of the output matrix; width^-1/2 by default.", low=0.0)
    tied: bool = option(False, "The output matrix is the tokens' embedding, times a constant by which it starts at head_std.")

    steps: int = option(20_000, "Steps.", least=1)
    batch: int = option(32, "Rows of a step, over all processes.", least=1)
    mask_share: float = option(0.15, "Share of the tokens that are masked; the same number in every row, at least one.", low=0.0)
    lr: float = option(5e-4, "Learning rate, reached after the warm-up.", low=0.0)
    warmup: int = option(1000, "Steps in which the learning rate grows linearly.", least=0)
    decay: str = option("linear", "After the warm-up: constant, or linearly to 0 at the last step.", choices=("none", "linear"))
    gain_lr: float = option(1.0, "Learning rate of the residual branches' lambda and gamma, times lr.", low=0.0)
    shaping_lr: float = option(1.0, "Learn: learning rate of gamma1, gamma2 and the negative slopes, times lr.", low=0.0)
    embedding_lr: float = option(10.0, "Learning rate of the embedding tables, times lr.", low=0.0)
    head_lr: float = option(1.0, "Learning rate of the output matrix, times lr; a tied one has the embedding's.", low=0.0)
    clip: float = option(0.0, "Largest norm of the gradient; 0 for no clipping.", low=0.0)
    seed: int = option(0, "Seed of the weights, the order of the rows and the masks.", least=0)

    device: str = option("auto", "cpu, cuda, or auto: cuda where there is one.", choices=("auto", "cpu", "cuda"))
    precision: str = option("auto", "float32, bf16, or auto: bf16 on a GPU.", choices=("auto", "float32", "bf16"))
    stream: str = option("bf16", "Tokens between the blocks: float32, or bf16 where the rest is.", choices=("float32", "bf16"))
    compile: str = option("auto", "Compile each block (quick to start), the whole model, or nothing; auto: blocks on a GPU.",
                          choices=("auto", "off", "blocks", "whole"))  # fmt: skip
    graph: str = option("auto", "The whole step as one CUDA graph; auto: on a single GPU.", choices=("auto", "on", "off"))
    attention: str = option("auto", "Kernel of the attention on a GPU.", choices=("auto", "flash", "cudnn", "efficient", "math"))

    log_every: int = option(50, "Steps between lines of metrics.jsonl.", least=1)
    evaluate_every: int = option(1000, "Steps between test losses; there is always one at the end.", least=1)
    observe_every: int = option(500, "Steps between looks at entropies, correlations, gradients and gains.", least=1)
    checkpoint_every: int = option(1000, "Steps between checkpoints.", least=1)
    keep: int = option(2, "Checkpoints that are kept; 0 for none at all.", least=0)
    save_model: bool = option(True, "Write the trained model at the end.")
    test_rows: int = option(1024, "Rows of the test losses on the way; the last one has them all.", least=1)
    minutes: float | None = option(None, "Stop after so many minutes, with a checkpoint; the same command goes on.", low=0.0)
    tensorboard: bool = option(True, "Write TensorBoard files where tensorboard is installed.")

    def __post_init__(self) -> None:
        check(self)
        for about in fields(self):
            if about.type == "Path":
                object.__setattr__(self, about.name, Path(getattr(self, about.name)))
        for name in ("embedding_std", "head_std"):
            if getattr(self, name) is not None:
                in_range(name, getattr(self, name), 0.0, 1e3)  # as in ShapedConfig
        if self.mask_share == 0.0:
            raise ValueError(f"mask_share must be above 0, got {self.mask_share}")
        if self.width % self.heads:
            raise ValueError(f"heads must divide the width, {self.width}, got {self.heads}")
        for name in ("gamma", "gamma_feedforward", "mask_share"):
            if getattr(self, name) is not None:
                in_range(name, getattr(self, name), 0.0, 1.0)
        if self.tied and self.head_lr != 1.0:
            raise ValueError(f"head_lr must be 1 for a tied output matrix, which embedding_lr is for, got {self.head_lr}")
        for name in ("embedding_std", "head_std"):
            if self.tied and getattr(self, name) == 0.0:
                raise ValueError(f"{name} must be positive for a tied output matrix, got {getattr(self, name)}")
        if self.warmup >= self.steps and self.decay == "linear":
            raise ValueError(f"warmup must be less than steps, {self.steps}, for a linear decay, got {self.warmup}")

    def learning_rate(self, step: int) -> float:
        """Of the step with this number, from 0: warm-up, then constant or linear to 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return self.lr * (self.steps - step) / (self.steps - self.warmup) if self.decay == "linear" else self.lr

    def to_toml(self) -> str:
        chosen = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items() if value is not None}
        return "".join(f"{name} = {_in_toml(value)}\n" for name, value in chosen.items())

    @classmethod
    def from_toml(cls, path: Path, **overrides: Any) -> Settings:
        """The file's settings; `overrides`, among them a preset for what neither says, prevail."""
        given = read_toml(path) | overrides
        preset = overrides.get("preset")
        if preset in PRESETS and PRESETS[preset].keys() <= given.keys():  # as where a run has left all its settings
            names = ", ".join(PRESETS[preset])
            raise ValueError(
                f"preset must change a setting, got {preset!r}, all of whose settings {path} has already, and the file prevails: "
                f"delete from the file what the preset is to set ({names})"
            )
        try:
            return cls.of(given)
        except ValueError as error:
            raise ValueError(f"{error} (in the settings of {path})") from None

    @classmethod
    def of(cls, given: dict[str, Any]) -> Settings:
        """From settings by name, among which may be a preset."""
        given = _without_preset(given)
        known = {about.name: about for about in fields(cls)}
        for name in given:
            if name not in known:
                raise ValueError(f"settings must be among {', '.join(known)}, got {name}")
        for name, about in known.items():
            if about.default is MISSING and given.get(name) is None:
                raise ValueError(f"{name} must be given: {about.metadata['help']}")
        return cls(**given)


def _without_preset(given: dict[str, Any]) -> dict[str, Any]:
    """The settings that are given, and those of the preset that are not."""
    if "preset" not in given:
        return given
    others = {name: value for name, value in given.items() if name != "preset"}
    preset = given["preset"]
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    return PRESETS[preset] | others


def _in_toml(value: Any) -> str:
    """As JSON, which is TOML but for the characters that JSON writes as two halves, and DEL, which TOML wants escaped."""

    def escaped(found: re.Match[str]) -> str:
        number = ord(found[0])
        return f"\\u{number:04x}" if number < 1 << 16 else f"\\U{number:08x}"

    return re.sub(r"[^\x00-\x7e]", escaped, json.dumps(value, ensure_ascii=False))


def read_toml(path: Path, name: str = "config") -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except FileNotFoundError as error:
        raise ValueError(f"{name} must be a TOML file, got {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # what is no TOML, no text or no file
        raise ValueError(f"{name} must be a TOML file, got {path}: {error}") from None


def like(name: str) -> Any:
    """The setting of that name, for another class of settings."""
    about = Settings.__dataclass_fields__[name]
    return field(default=about.default, metadata=about.metadata)


def check(settings: Any) -> None:
    """Is every setting of a class made of `option` what it may be?"""
    hints = typing.get_type_hints(type(settings))
    for about in fields(settings):
        _check(about, getattr(settings, about.name), hints[about.name])


def _check(about: Field[Any], value: Any, kind: Any) -> None:
    """What the field's type and metadata say; None only where the type has it."""
    name, rules = about.name, about.metadata
    optional = isinstance(kind, types.UnionType)
    if value is None and optional:
        return
    kind = next(part for part in typing.get_args(kind) if part is not type(None)) if optional else kind
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    if kind is int:
        whole_number(name, value, least=rules["least"], most=rules["most"])
    if kind is float and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if kind is float:
        number = finite(name, value) if rules["low"] != 1e-6 else positive(name, value)
        if abs(number) > FLOAT32:  # training would make an infinity of it
            raise ValueError(f"{name} must be finite in float32, got {value}")
        if rules["low"] is not None and number < rules["low"]:
            raise ValueError(f"{name} must be at least {rules['low']:g}, got {value}")
    if kind in (str, Path) and not isinstance(value, str | Path):
        raise ValueError(f"{name} must be a text, got {value!r}")
    if kind is Path and (not str(value) or re.search(r"[\0\ud800-\udfff]", str(value))):  # halves: bytes that are no UTF-8
        raise ValueError(f"{name} must be a path, got {str(value)!r}")
    if rules["choices"] and value not in rules["choices"]:
        raise ValueError(f"{name} must be one of {', '.join(rules['choices'])}, got {value!r}")


HINTS = typing.get_type_hints(Settings)
