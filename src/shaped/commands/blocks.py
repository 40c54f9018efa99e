"""The block of layers that the commands' options describe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shaped.files import read_array
from shaped.layers import Chain, Layer, ShapedAttention, ShapedFeedForward, ShapedPerceptron, alibi
from shaped.layers.masks import Mask, check_mask

USED_BY = {option: {"attention"} for option in ("tau0", "heads", "project", "mask", "qk_norm", "rope")}
USED_BY |= {"gamma": {"attention", "feedforward"}} | {option: {"feedforward", "perceptron"} for option in ("c_plus", "c_minus")}
"""The layers that have a use for an option."""


@dataclass(frozen=True, kw_only=True)
class BlockSettings:
    """The paper's Figure 1 by default."""

    layers: str = "attention,feedforward"
    tokens: int = 4
    gamma: float = 8**-0.5
    tau0: float = 1.0
    heads: int = 1
    project: bool = False
    mask: str | None = None
    c_plus: float = 0.0
    c_minus: float = -1.0
    rho: float = 0.2
    qk_norm: bool = False
    rope: float | None = None

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """From a command's arguments, of which some are no settings."""
        return cls(**{name: value for name, value in options.items() if name in cls.__dataclass_fields__})

    def build_layer(self) -> Layer:
        makers = {
            "attention": lambda: ShapedAttention(
                self.gamma,
                self.tau0,
                self.heads,
                self.project,
                read_mask(self.mask, self.tokens, self.heads),
                qk_norm=self.qk_norm,
                rope=self.rope,
            ),
            "feedforward": lambda: ShapedFeedForward(self.gamma, self.c_plus, self.c_minus),
            "perceptron": lambda: ShapedPerceptron(self.c_plus, self.c_minus),
        }
        for name in self.names:
            if name not in makers:
                raise ValueError(f"layers must be a list of {', '.join(makers)}, got {name!r}")
        for option, layers in USED_BY.items():
            if getattr(self, option) != self.__dataclass_fields__[option].default and not layers & {*self.names}:
                kind = " or ".join(sorted(layers))
                raise ValueError(f"{option} must be left out without a layer {kind}, got {getattr(self, option)} for {self.layers}")
        return Chain(*(makers[name]() for name in self.names))

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.layers.split(",")]


def read_mask(mask: str | None, tokens: int, heads: int) -> Mask:
    """None, "causal", "alibi", or the bias in a .npy file, [tokens, tokens] or [heads, tokens, tokens]."""
    if mask is None or mask == "causal":
        return mask
    if mask == "alibi":
        return alibi(tokens, heads)
    if not mask.endswith(".npy"):
        raise ValueError(f"mask must be causal, alibi or a .npy file, got {mask!r}")
    bias = read_array(Path(mask), "mask", most=tokens * tokens * heads)
    if bias.shape not in ((tokens, tokens), (heads, tokens, tokens)):
        wanted = f"[{tokens}, {tokens}] or [{heads}, {tokens}, {tokens}]"
        raise ValueError(f"mask must be {wanted} for {tokens} tokens and {heads} heads, got shape {list(bias.shape)} in {mask}")
    return check_mask(bias, heads)
