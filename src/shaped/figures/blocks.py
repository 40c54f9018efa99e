"""The block of layers that the commands' options describe."""

from __future__ import annotations

from dataclasses import dataclass

from shaped.layers import Chain, Layer, ShapedAttention, ShapedFeedForward, ShapedPerceptron


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
            "attention": lambda: ShapedAttention(self.gamma, self.tau0, self.heads, self.project, self.mask),
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
