"""The fields of the page's form, with their bounds, and the question that their values make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

ROUNDING = 1e-9


class Refused(ValueError):
    """A value that the form does not take. It knows the field's name."""

    def __init__(self, name: str, message: str):
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class Field:
    """One field: a slider, a choice or a switch."""

    name: str
    symbol: str
    label: str
    kind: str
    """"whole", "real", "choice" or "switch"."""
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    scale: str = "linear"
    step: float | None = None
    choices: tuple[str, ...] = field(default=())
    multiple_of: str | None = None
    divides: str | None = None

    def parse(self, text: str) -> Any:
        """The value that a text stands for, if it is within the bounds."""
        if self.kind == "choice":
            if text not in self.choices:
                raise Refused(self.name, f"{self.name} must be one of {', '.join(self.choices)}, got {shorten(text)!r}")
            return text
        if self.kind == "switch":
            if text not in ("true", "false"):
                raise Refused(self.name, f"{self.name} must be true or false, got {shorten(text)!r}")
            return text == "true"
        try:
            value = int(text) if self.kind == "whole" else float(text)
        except ValueError:
            number = "whole number" if self.kind == "whole" else "number"
            raise Refused(self.name, f"{self.name} must be a {number}, got {shorten(text)!r}") from None
        assert self.low is not None
        assert self.high is not None
        if not self.low <= value <= self.high:  # nan is refused too
            raise Refused(self.name, f"{self.name} must be from {self.low:g} to {self.high:g}, got {shorten(text)}")
        return value


FIELDS = (
    Field("width", "n", "width", "whole", 200, "Features of a token, 8 to 4096.", 8, 4096, "log", multiple_of="heads"),
    Field("depth", "d", "depth", "whole", 150, "Blocks, 1 to 512, and at most 8 times the width.", 1, 512, "log"),
    Field("tokens", "m", "tokens", "whole", 4, "Tokens of a sequence, 2 to 32; times width times depth at most 2²⁴.", 2, 32, "log"),
    Field("gamma", "γ", "gamma", "real", 8**-0.5, "Weight of the residual branches; the shortcut has √(1 − γ²).", 0.01, 1.0, "log"),
    Field("tau0", "τ₀", "tau0", "real", 1.0, "Temperature of shaped attention; the logits are divided by τ₀√(n·n_k).", 0.05, 20.0, "log"),
    Field("c_plus", "c₊", "c_plus", "real", 0.0, "Shaped ReLU: its positive slope is 1 + c₊/√n.", -5.0, 5.0, step=0.1),
    Field("c_minus", "c₋", "c_minus", "real", -1.0, "Shaped ReLU: its negative slope is 1 + c₋/√n.", -5.0, 5.0, step=0.1),
    Field("heads", "H", "heads", "whole", 1, "Attention heads, 1 to 64, at most 2048 in all layers.", 1, 64, "log", divides="width"),
    Field("mask", "", "mask", "choice", "none", "Which tokens a token sees: all, or none after it.", choices=("none", "causal")),
    Field("qk_norm", "", "QK-norm", "switch", False, "Divide queries and keys by their root mean square."),
    Field("rho", "ρ₀", "start", "real", 0.2, "Correlation of each pair of tokens at the start.", 0.0, 0.99, step=0.01),
    Field("seed", "", "seed", "whole", 0, "Seed of the random numbers.", 0, 999999),
)  # fmt: skip
MOST_TIME = 8.0
"""Depth over width. Later, shaped networks of every gamma on the map have exploded or aligned, and the SDE takes thousands of steps."""
MOST_FEATURES = 2**24
"""Of all tokens in all layers. A network with so many takes a fifth of a second."""
MOST_HEADS = 2048
"""Over all layers. Heads are drawn one after another, so they take the time that many layers do."""


def shorten(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}…"


@dataclass(frozen=True)
class Question:
    """What the page asks: a shaped network of a size, and its constants."""

    width: int
    depth: int
    tokens: int
    gamma: float
    tau0: float
    c_plus: float
    c_minus: float
    heads: int
    mask: str
    qk_norm: bool
    rho: float
    seed: int

    def __post_init__(self) -> None:
        """What no field can check by itself."""
        if self.width < self.tokens:
            raise Refused("width", f"width must be at least {self.tokens}, the number of tokens, got {self.width}")
        if self.width % self.heads:
            raise Refused("heads", f"heads must divide the width {self.width}, got {self.heads}")
        if self.tokens * self.width * self.depth > MOST_FEATURES:
            most = MOST_FEATURES // (self.width * self.depth)
            raise Refused("tokens", f"tokens must be at most {most} at width {self.width} and depth {self.depth}, got {self.tokens}")
        if self.heads * self.depth > MOST_HEADS:
            most = MOST_HEADS // self.depth
            raise Refused("heads", f"heads must be at most {most} at depth {self.depth}: {MOST_HEADS} in all layers, got {self.heads}")
        if self.depth > MOST_TIME * self.width:
            raise Refused("depth", f"depth must be at most {MOST_TIME:g} times the width {self.width}, got {self.depth}")

    @property
    def time(self) -> float:
        """The horizon of the SDE."""
        return self.depth / self.width

    @property
    def project(self) -> bool:
        """Is there an output projection? With one head there is none, as in the paper; several heads are mixed, as in every Transformer."""
        return self.heads > 1

    @property
    def values(self) -> dict[str, Any]:
        return asdict(self)


def parse_question(given: Mapping[str, str]) -> Question:
    """The question of an address. Names that are missing have their default."""
    known = {field.name: field for field in FIELDS}
    for name in given:
        if name not in known:
            raise Refused(name, f"{shorten(name)} must be left out: there is no such field, only {', '.join(known)}")
    return Question(**{name: field.parse(given[name]) if name in given else field.default for name, field in known.items()})


def describe_fields() -> list[dict[str, Any]]:
    """For the page."""
    optional = ("multiple_of", "divides")
    described = [asdict(field) | {"choices": list(field.choices)} for field in FIELDS]
    return [{name: value for name, value in field.items() if name not in optional or value is not None} for field in described]


def round_up(value: float) -> int:
    return math.ceil(value - ROUNDING)
