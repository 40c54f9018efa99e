"""Question: the network that is asked about, what counts as a failure, and the blocks that are simulated for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from shaped.checks import SINGLE, check_bool, finite, in_range, keep, positive, whole_number
from shaped.covariance import equicorrelated
from shaped.layers import FeedForwardBranch, Layer, Norm, PostLN, PreLN, ResidualBlock, ShapedAttention, ShapedFeedForward, Weights
from shaped.layers.base import Sizes
from shaped.layers.masks import Mask, check_mask, describe_mask
from shaped.layers.rope import Rope, check_rope
from shaped.nn.activations import C_MINUS, ShapedReLU
from shaped.trajectory import Trajectory

COMPARED = ("unshaped", "Pre-LN", "Post-LN")
"""Blocks of the same size to compare with. Unshaped: softmax attention and ReLU, with gains as the shaped block, without norms."""
VANISHED = 0.01
"""A path that left the range of floats is judged by its last state within it. One that vanished is far shorter there, below 1e-4. One that
exploded may have done so in a single step of the solver, from its start: it may be a little shorter than it was, but not so much."""


class Judged(NamedTuple):
    """Of each path: does it align, does it explode; its mean absolute correlation; how much its stream's length grew."""

    failed: Bool[Tensor, "sample 2"]
    correlation: Float[Tensor, " sample"]
    growth: Float[Tensor, " sample"]


@dataclass(frozen=True, eq=False)
class Question:
    """A network of this package at initialisation, and the bounds beyond which it fails."""

    n: int
    d: int
    m: int
    heads: int = 8
    mask: Mask = "causal"
    qk_norm: bool = False
    rope: Rope = None
    hidden: int | None = None
    """Width inside the feed-forward layers; 4n by default, as in the modules."""
    c_minus: float = C_MINUS
    rho: float = 0.2
    correlation: float = 0.9
    growth: float = 10.0
    share: float = 0.01

    def __post_init__(self) -> None:
        keep(self, whole_number, "n", "d", "m", "heads", "hidden")
        keep(self, check_bool, "qk_norm")
        keep(self, in_range, "rho", "correlation", low=0.0, high=1.0)
        keep(self, positive, "growth", most=1e4)  # lengths of more than 6e4 leave the safe part of float32
        keep(self, in_range, "share", low=1e-4, high=0.5)  # fewer failures take too many networks to see
        keep(self, finite, "c_minus", most=SINGLE)
        if self.m < 2:
            raise ValueError(f"m must be at least 2: one token has no correlation, got {self.m}")
        Sizes(self.n).check_tokens(self.m)
        if self.n % self.heads:
            raise ValueError(f"heads must divide the width n = {self.n}, got {self.heads}")
        object.__setattr__(self, "mask", check_mask(self.mask, self.heads))
        if isinstance(self.mask, Tensor) and self.mask.shape[-1] != self.m:
            raise ValueError(f"mask must be for the m = {self.m} tokens, got shape {tuple(self.mask.shape)}")
        object.__setattr__(self, "rope", check_rope(self.rope))
        object.__setattr__(self, "hidden", 4 * self.n if self.hidden is None else self.hidden)
        if not self.rho < self.correlation < 1.0:
            raise ValueError(f"correlation must lie above rho = {self.rho:g}, where tokens start, and below 1, got {self.correlation}")
        if not self.growth > 1.0:
            raise ValueError(f"growth must be above 1, the length at the start, got {self.growth}")
        self.network(0.5, 1.0).check_sizes(Sizes(self.n, None))

    def start(self, m: int | None = None) -> Float[Tensor, "m m"]:
        return equicorrelated(self.m if m is None else m, self.rho)

    def lets_attend(self, m: int) -> bool:
        """Does the mask leave each of the first m tokens one among them to attend to?"""
        return not isinstance(self.mask, Tensor) or bool((self.mask[..., :m, :m] > -math.inf).any(-1).all())

    def attention(self, gamma: float, tau0: float, m: int | None = None, **how: Any) -> ShapedAttention:
        mask = self.mask[..., :m, :m] if isinstance(self.mask, Tensor) else self.mask
        return ShapedAttention(gamma, tau0, self.heads, True, mask, qk_norm=self.qk_norm, rope=self.rope, **how)

    def feedforward(self, *, shaped: bool, **how: Any) -> ResidualBlock:
        """As `ShapedFeedForwardBlock` starts."""
        assert self.hidden is not None
        activation = ShapedReLU(0.0, self.c_minus)
        function = activation.at(self.n) if shaped else activation.plain
        inner, outer = Weights(self.n**-0.5), Weights(math.sqrt(function.normaliser() / self.hidden))
        return ResidualBlock(FeedForwardBranch(self.hidden, inner, outer, function), **how)

    def network(self, gamma: float, tau0: float, m: int | None = None) -> Layer:
        """A block as `ShapedTransformerBlock` starts: both branches have the weight gamma."""
        return self.attention(gamma, tau0, m) >> self.feedforward(shaped=True, lam=math.sqrt(1.0 - gamma**2), gamma=gamma)

    def limit(self, gamma: float, tau0: float) -> Layer:
        """The paper's block, whose feed-forward layer has n hidden features. Its noise is 2γ²; with 4n features it is γ²(2 − 3γ²/4)."""
        return self.attention(gamma, tau0) >> ShapedFeedForward(gamma, c_minus=self.c_minus)

    def compared(self, name: str, gamma: float, m: int | None = None) -> Layer:
        """A block that is not shaped, with the usual temperature."""
        if name == "unshaped":
            shortcut = math.sqrt(1.0 - gamma**2)
            return self.attention(gamma, 1.0, m).unshaped >> self.feedforward(shaped=False, lam=shortcut, gamma=gamma)
        attention, norm = self.attention(1.0, 1.0, m, lam=1.0).unshaped, Norm("layer")
        if name == "Pre-LN":
            return PreLN(attention) >> self.feedforward(shaped=False, norm=norm)
        return PostLN(attention) >> self.feedforward(shaped=False, after=norm)

    def judge(self, paths: Trajectory, *, may_grow: bool = False) -> Judged:
        """Which paths fail at the last layer. With `may_grow` a path explodes only if it leaves the range of floats.

        A path that left it upwards or downwards stopped there. One that shrank to nothing is judged by its correlation.
        """
        V = paths.V[-1].double().cpu()
        correlation, growth = mean_absolute_correlation(paths.rho[-1].double().cpu()), V.diagonal(dim1=-2, dim2=-1).mean(-1).sqrt()
        exploded = (paths.stopped.isfinite() & (growth > VANISHED)) | (growth > (math.inf if may_grow else self.growth))
        aligned = (correlation > self.correlation) & ~exploded
        return Judged(torch.stack((aligned, exploded), -1), correlation, growth)

    def describe(self) -> dict[str, Any]:
        """For JSON."""
        names = ("n", "d", "m", "heads", "qk_norm", "rope", "hidden", "c_minus", "rho", "correlation", "growth", "share")
        mask = self.mask if self.mask is None or isinstance(self.mask, str) else describe_mask(self.mask)
        return {name: getattr(self, name) for name in names} | {"mask": mask}


def mean_absolute_correlation(rho: Float[Tensor, "*batch m m"]) -> Float[Tensor, "*batch"]:
    """Over pairs of tokens. Without the absolute value a stream of rank one, in which half of the tokens point back, would look healthy."""
    m = rho.shape[-1]
    return (rho.abs().sum((-2, -1)) - m) / (m * (m - 1))


def squared_error(outputs: Float[Tensor, "batch m k"]) -> Float[Tensor, " batch"]:
    return outputs.square().sum((-2, -1)) / 2


def median(values: Tensor) -> float:
    return torch.quantile(values, 0.5).item()
