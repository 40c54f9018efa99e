"""Trainable layers: shaped attention and feed-forward blocks, encoder and decoder. At initialisation they follow the theory."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shaped.checks import finite, in_range, positive, whole_number
from shaped.nn.functional import he_constant, shaped_attention, shaped_relu
from shaped.nn.schedules import Fixed, Schedule, Shapeable

Tokens = Float[Tensor, "*batch m width"]


class ShapedSelfAttention(Shapeable):
    r"""Multi-head self-attention $[A_h X W^V_h]_h W^O$ with $A = \gamma_1 I + \text{softmax} - \gamma_2\,\text{softmax}(B)$
    (Eq. shaped-attention-train).

    Weights start with variance 1/width, as the theory has them. The theory's temperature $\tau = \tau_0\sqrt{n n_k}$ is
    $\tau_0\sqrt{n}$ times the usual one; that factor is in the initial queries and keys, whose variance is $n^{-3/2}/\tau_0$, or,
    with `fold=False`, in the scale of the logits.

    Args:
        width, heads: n and the number of heads, which must divide it.
        key_width: features of each head's queries and keys; width/heads by default.
        tau0: temperature.
        causal: a token sees itself and what came before it.
        fold: put the temperature into the initial weights (the default: learning rates then need no change) or into the scale.
        dropout: of the softmax; identity and centring are not dropped.
        schedule: gamma1 and gamma2 are parameters if it learns them, buffers else.
    """

    gamma1: Tensor
    gamma2: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_width: int | None = None,
        tau0: float = 1.0,
        causal: bool = False,
        fold: bool = True,
        dropout: float = 0.0,
        schedule: Schedule | None = None,
    ):
        super().__init__()
        whole_number("width", width)
        if whole_number("heads", heads) and width % heads:
            raise ValueError(f"heads must divide the width, {width}, got {heads}")
        positive("tau0", tau0)
        in_range("dropout", dropout, 0.0, 1.0)
        key_width = width // heads if key_width is None else whole_number("key_width", key_width)
        self.heads, self.causal, self.dropout = heads, causal, dropout
        extra = tau0 * math.sqrt(width)
        self.scale = key_width**-0.5 if fold else key_width**-0.5 / extra
        std = (width * extra) ** -0.5 if fold else width**-0.5
        self.query, self.key = (_linear(width, heads * key_width, std) for _ in range(2))
        self.value, self.output = (_linear(width, width, width**-0.5) for _ in range(2))
        for name in ("gamma1", "gamma2"):
            _gain(self, name, 1.0, (schedule or Fixed()).learns)

    def forward(self, x: Tokens, attn_mask: Tensor | None = None) -> Tokens:
        """`attn_mask` as in `shaped_attention`: key padding is [batch, 1, 1, m], True where a token may be attended to."""
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for layer in (self.query, self.key, self.value))
        mixed = shaped_attention(
            q,
            k,
            v,
            gamma1=self.gamma1,
            gamma2=self.gamma2,
            scale=self.scale,
            is_causal=self.causal,
            attn_mask=attn_mask,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.output(mixed.transpose(-2, -3).flatten(-2))

    def shaping(self) -> tuple[Tensor, ...]:
        return self.gamma1, self.gamma2

    def set_shaping(self, share: float) -> None:
        self.gamma1.fill_(share)
        self.gamma2.fill_(share)


class ShapedFeedForwardBlock(Shapeable):
    r"""$\sigma_s(X W^{\text{pre}})\,W^{\text{post}}$ with $\sigma_s$ of slopes 1 and, at the start, $s_- = 1 + c_-/\sqrt{n}$ (Eq. resnet).

    Args:
        width, hidden: n and the width inside; 4·width by default.
        c_minus: the negative slope starts at 1 + c_minus/sqrt(width).
        schedule: the negative slope is a parameter if it learns it, a buffer else.
    """

    slope: Tensor

    def __init__(self, width: int, hidden: int | None = None, *, c_minus: float = -1.0, schedule: Schedule | None = None):
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        whole_number("width", width)
        whole_number("hidden", hidden)
        finite("c_minus", c_minus)
        self.start = 1.0 + c_minus / math.sqrt(width)
        self.pre = _linear(width, hidden, width**-0.5)
        self.post = _linear(hidden, width, math.sqrt(he_constant(self.start) / hidden))
        _gain(self, "slope", self.start, (schedule or Fixed()).learns)

    def forward(self, x: Tokens) -> Tokens:
        return self.post(shaped_relu(self.pre(x), self.slope))

    def shaping(self) -> tuple[Tensor, ...]:
        return (self.slope,)

    def set_shaping(self, share: float) -> None:
        self.slope.fill_(share * self.start)


class ShapedTransformerBlock(nn.Module):
    r"""$Z = \lambda X + \gamma\,\text{attention}(X)$, $X' = \lambda Z + \gamma\,\text{feedforward}(Z)$ (Eq. shaped_transformer).

    There is no LayerNorm. Each branch has a $\lambda$ and a $\gamma$ of its own, trained unless `train_gains` is False; $\lambda$ starts
    at $\sqrt{1-\gamma^2}$.
    """

    lam_attention: Tensor
    gamma_attention: Tensor
    lam_feedforward: Tensor
    gamma_feedforward: Tensor

    def __init__(self, attention: ShapedSelfAttention, feedforward: ShapedFeedForwardBlock, gamma: float, train_gains: bool = True):
        super().__init__()
        in_range("gamma", gamma, 0.0, 1.0)
        self.attention, self.feedforward = attention, feedforward
        lam = math.sqrt(1.0 - gamma**2)
        for branch in ("attention", "feedforward"):
            _gain(self, f"lam_{branch}", lam, train_gains)
            _gain(self, f"gamma_{branch}", gamma, train_gains)

    def forward(self, x: Tokens, attn_mask: Tensor | None = None) -> Tokens:
        x = self.lam_attention * x + self.gamma_attention * self.attention(x, attn_mask)
        return self.lam_feedforward * x + self.gamma_feedforward * self.feedforward(x)


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
        c_minus: float = -1.0,
        fold: bool = True,
        dropout: float = 0.0,
        train_gains: bool = True,
        schedule: Schedule | None = None,
    ):
        super().__init__()
        whole_number("depth", depth)
        self.schedule = schedule or Fixed()

        def block() -> ShapedTransformerBlock:
            attention = ShapedSelfAttention(width, heads, tau0=tau0, causal=self.causal, fold=fold, dropout=dropout, schedule=self.schedule)
            feedforward = ShapedFeedForwardBlock(width, hidden, c_minus=c_minus, schedule=self.schedule)
            return ShapedTransformerBlock(attention, feedforward, gamma, train_gains)

        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tokens, attn_mask: Tensor | None = None) -> Tokens:
        for block in self.blocks:
            x = block(x, attn_mask)
        return x


class ShapedDecoder(ShapedEncoder):
    """The same stack in which a token sees only itself and what came before it."""

    causal = True


def gains(model: nn.Module) -> list[nn.Parameter]:
    """The trained scalars of a shaped model (lambda, gamma, gamma1, gamma2, negative slopes): keep them out of weight decay."""
    owners = (ShapedSelfAttention, ShapedFeedForwardBlock, ShapedTransformerBlock)
    return [gain for module in model.modules() if isinstance(module, owners) for gain in module.parameters(recurse=False)]


def _linear(rows: int, columns: int, std: float) -> nn.Linear:
    layer = nn.Linear(rows, columns, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer


def _gain(module: nn.Module, name: str, start: float, trained: bool) -> None:
    """Gives the module a scalar: a parameter if it is trained, else a buffer, saved with the weights either way."""
    value = torch.tensor(float(start))
    if trained:
        module.register_parameter(name, nn.Parameter(value))
    else:
        module.register_buffer(name, value)
