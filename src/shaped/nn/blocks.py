"""Transformer blocks, stacks of them, and functions of a whole model: its gains, its parameter groups, its vanilla form."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from jaxtyping import Float
from torch import Tensor, nn

from shaped.checks import HUGE, check_bool, in_range, quote, whole_number
from shaped.nn.activations import C_MINUS, ShapedActivation
from shaped.nn.modules import DEEPEST, Attend, ShapedFeedForwardBlock, ShapedSelfAttention, Tokens, add_gain, has_gains
from shaped.nn.norms import MakeNorm
from shaped.nn.rotary import Rotation
from shaped.nn.schedules import Schedule, Shapeable, check_schedule

Some = Float[Tensor, "*batch k width"]  # k of the m tokens
Model = TypeVar("Model", bound=nn.Module)


class ShapedTransformerBlock(nn.Module):
    r"""$Z = \lambda X + \gamma\,\text{attention}(X)$, $X' = \lambda Z + \gamma\,\text{feedforward}(Z)$ (Eq. shaped_transformer).

    There is no LayerNorm. Each branch has a $\lambda$ and a $\gamma$ of its own, trained unless `train_gains` is False; $\lambda$ starts
    at $\sqrt{1-\gamma^2}$. The feed-forward branch starts at `gamma_feedforward` where that is given, at `gamma` else.
    """

    lam_attention: Tensor
    gamma_attention: Tensor
    lam_feedforward: Tensor
    gamma_feedforward: Tensor

    def __init__(
        self,
        attention: ShapedSelfAttention,
        feedforward: ShapedFeedForwardBlock,
        gamma: float,
        train_gains: bool = True,
        gamma_feedforward: float | None = None,
    ):
        super().__init__()
        self.attention, self.feedforward = attention, feedforward
        self.start = {}
        gamma = in_range("gamma", gamma, 0.0, 1.0)
        check_bool("train_gains", train_gains)
        feedforward_gain = gamma if gamma_feedforward is None else in_range("gamma_feedforward", gamma_feedforward, 0.0, 1.0)
        for branch, given in (("attention", gamma), ("feedforward", feedforward_gain)):
            self.start |= {f"lam_{branch}": math.sqrt(1.0 - given**2), f"gamma_{branch}": given}
        for name, start in self.start.items():
            add_gain(self, name, start, train_gains)

    def reset_parameters(self) -> None:
        """Sets the gains to their initial values."""
        for name, start in self.start.items():
            nn.init.constant_(getattr(self, name), start)

    def forward(
        self,
        x: Tokens,
        attn_mask: Tensor | None = None,
        attend: Attend | None = None,
        places: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Some:
        """`places`, [batch, k]: the tokens to return; all of them by default. The feed-forward branch computes no others.

        The other arguments are those of `ShapedSelfAttention`.
        """
        # Gains may have a higher precision than the tokens; cast the sum back.
        x = (self.lam_attention * x + self.gamma_attention * self.attention(x, attn_mask, attend, rotation)).to(x.dtype)
        x = x if places is None else gather_tokens(x, places)
        return (self.lam_feedforward * x + self.gamma_feedforward * self.feedforward(x)).to(x.dtype)


class NormBlock(nn.Module):
    """The usual blocks, to compare with: x + branch(norm(x)) for "pre", norm(x + branch(x)) for "post".

    `norm` makes a norm for a width: `nn.LayerNorm`, or one of `shaped.nn.norms`.
    """

    def __init__(
        self,
        attention: ShapedSelfAttention,
        feedforward: ShapedFeedForwardBlock,
        place: Literal["pre", "post"],
        norm: MakeNorm = nn.LayerNorm,
    ):
        super().__init__()
        if place not in ("pre", "post"):
            raise ValueError(f"place must be 'pre' or 'post', got {quote(place)}")
        self.attention, self.feedforward, self.place = attention, feedforward, place
        self.norm_attention, self.norm_feedforward = (norm(attention.query.in_features) for _ in range(2))

    def forward(
        self,
        x: Tokens,
        attn_mask: Tensor | None = None,
        attend: Attend | None = None,
        places: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Some:
        """Arguments as in `ShapedTransformerBlock`."""
        if self.place == "pre":
            x = x + self.attention(self.norm_attention(x), attn_mask, attend, rotation)
            x = x if places is None else gather_tokens(x, places)
            return x + self.feedforward(self.norm_feedforward(x))
        dtype = x.dtype  # autocast computes norms in float32
        x = x + self.attention(x, attn_mask, attend, rotation)
        x = self.norm_attention(x if places is None else gather_tokens(x, places)).to(dtype)
        return self.norm_feedforward(x + self.feedforward(x)).to(dtype)


def gather_tokens(x: Tensor, places: Tensor) -> Tensor:
    """The tokens at places [batch, k], of tokens [batch, m, width]."""
    if x.ndim != 3 or places.ndim != 2 or len(places) != len(x):
        raise ValueError(f"places must be [batch, k] for tokens [batch, m, width], got {list(places.shape)} for {list(x.shape)}")
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


class ShapedEncoder(nn.Module):
    """A stack of shaped Transformer blocks in which every token sees every token, for tokens [batch, m, width]."""

    causal = False

    def __init__(
        self,
        depth: int,
        width: int,
        heads: int,
        *,
        gamma: float,
        hidden: int | None = None,
        tau0: float = 1.0,
        c_minus: float = C_MINUS,
        fold: bool = True,
        dropout: float = 0.0,
        train_gains: bool = True,
        schedule: Schedule | None = None,
        activation: ShapedActivation | None = None,
        qk_norm: bool = False,
        qk_gain: bool = False,
    ):
        super().__init__()
        depth = whole_number("depth", depth, most=DEEPEST)
        self.schedule = check_schedule(schedule)

        def block() -> ShapedTransformerBlock:
            attention = ShapedSelfAttention(
                width,
                heads,
                tau0=tau0,
                causal=self.causal,
                fold=fold,
                dropout=dropout,
                schedule=self.schedule,
                qk_norm=qk_norm,
                qk_gain=qk_gain,
            )
            feedforward = ShapedFeedForwardBlock(width, hidden, c_minus=c_minus, schedule=self.schedule, activation=activation)
            return ShapedTransformerBlock(attention, feedforward, gamma, train_gains)

        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tokens, attn_mask: Tensor | None = None) -> Tokens:
        for block in self.blocks:
            x = block(x, attn_mask)
        return x


class ShapedDecoder(ShapedEncoder):
    """The same stack in which a token sees only itself and what came before it."""

    causal = True


def gains(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained scalars of a shaped model, by name: lambda, gamma, gamma1, gamma2, the activations' slopes."""
    owners = (Shapeable, ShapedTransformerBlock)
    return {
        name: gain
        for prefix, module in model.named_modules()
        if isinstance(module, owners)
        for name, gain in module.named_parameters(prefix, recurse=False)
    }


def parameter_groups(model: nn.Module, weight_decay: float = 0.01) -> list[dict[str, Any]]:
    """Two groups for an optimiser: matrices under weight decay; gains, norms and biases, which must not shrink, without it."""
    in_range("weight_decay", weight_decay, 0.0, HUGE)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, others = ([p for p in trained if (p.ndim >= 2) is wanted] for wanted in (True, False))
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def vanilla(model: Model) -> Model:
    """A copy without the shaping, which must be 0 (`Recover`): softmax attention and the plain activation, with the same outputs.

    The residual branches keep their lambda and gamma.
    """
    for name, module in model.named_modules():
        if isinstance(module, Shapeable) and any(bool((gain != 0).any()) for gain in module.scalars()):
            left = ", ".join(f"{gain.item():.3g}" for gain in module.scalars())
            raise ValueError(f"model must have gamma1 = gamma2 = 0 and slopes 0 (Recover), got {left} in {name or 'it'}")
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        if has_gains(module):
            module.register_module("shaping", None)
        if isinstance(module, ShapedFeedForwardBlock) and module.slope is not None:
            del module.slope
            module.slope = None
    return model


@dataclass(frozen=True)
class BlockKind:
    about: str
    """A few words for the commands' help."""
    parts: frozenset[str]
    """What it has beside attention and feed-forward: gains of its residual branches, shaping, norms, DyT."""


BLOCKS = {
    "shaped": BlockKind("the paper's block, without norms", frozenset({"gains", "shaping"})),
    "preln": BlockKind("a norm before each branch", frozenset({"norms"})),
    "postln": BlockKind("a norm after each branch", frozenset({"norms"})),
    "vanilla": BlockKind("the shaped block without its shaping", frozenset({"gains"})),
    "dyt": BlockKind("preln with DyT in place of its norms", frozenset({"dyt"})),
}


def check_init(init: str, block: str) -> None:
    """Refuses another initialisation than the theory's for blocks that are the theory's."""
    if init != "theory" and "gains" in BLOCKS[block].parts:
        raise ValueError(f"init must be 'theory' for {block} blocks, whose matrices have the theory's variances, got {init!r}")
