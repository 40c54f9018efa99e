"""The block of layers that the commands' options describe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shaped.files import read_array
from shaped.layers import Chain, Layer, ShapedAttention, ShapedFeedForward, ShapedPerceptron, alibi
from shaped.layers.masks import Mask, checked_mask


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

    def layer(self) -> Layer:
        made = {
            "attention": lambda: ShapedAttention(
                self.gamma, self.tau0, self.heads, self.project, read_mask(self.mask, self.tokens, self.heads)
            ),
            "feedforward": lambda: ShapedFeedForward(self.gamma, self.c_plus, self.c_minus),
            "perceptron": lambda: ShapedPerceptron(self.c_plus, self.c_minus),
        }
        for name in self.names:
            if name not in made:
                raise ValueError(f"layers must be a list of {', '.join(made)}, got {name!r}")
        return Chain(*(made[name]() for name in self.names))

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.layers.split(",")]


def read_mask(mask: str | None, tokens: int, heads: int) -> Mask:
    """None, "causal", "alibi", or what a .npy file holds: a bias, [tokens, tokens] or [heads, tokens, tokens]."""
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
    return checked_mask(bias, heads)
