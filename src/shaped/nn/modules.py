"""Trainable layers: self-attention and feed-forward, shaped or plain. At initialisation the shaped ones follow the theory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shaped.checks import SINGLE, check_bool, finite, in_range, positive, whole_number
from shaped.kernels import long_attention, short_attention
from shaped.nn.activations import C_MINUS, ShapedActivation, ShapedReLU, check_activation
from shaped.nn.functional import RMS_EPS, rms_norm, shaped_attention
from shaped.nn.rotary import Rotation, rotate
from shaped.nn.schedules import Schedule, Shapeable, check_schedule

DEEPEST = 10_000  # blocks of a stack: more than anyone trains, and they still fit into memory
Tokens = Float[Tensor, "*batch m width"]
Attend = Callable[["ShapedSelfAttention", Tensor, Tensor, Tensor, Tensor | None], Tensor]


Stock = TypeVar("Stock", nn.Linear, nn.Embedding)


def make_linear(features: int, outputs: int, std: float) -> nn.Linear:
    """A matrix without bias, whose entries start as N(0, std²).

    A plain `nn.Linear`, not a subclass: quantisers (bitsandbytes, torchao, `quantize_dynamic`) replace `nn.Linear` and ignore other
    classes.
    """
    return init_normal(nn.Linear(features, outputs, bias=False, device="meta"), std)


def init_normal(layer: Stock, std: float) -> Stock:
    """Draws the weight of a layer from the meta device as N(0, std²). The layer keeps `std`, so that it can be initialised again."""
    layer.weight = nn.Parameter(torch.empty(layer.weight.shape))
    layer.__dict__["std"] = std
    nn.init.normal_(layer.weight, std=std)
    return layer


class AttentionShaping(Shapeable):
    r"""$\gamma_1$ and $\gamma_2$ of an attention (Eq. shaped-attention-train): parameters if `trained`, buffers else."""

    gamma1: Tensor
    gamma2: Tensor

    def __init__(self, gamma1: float = 1.0, gamma2: float = 1.0, trained: bool = False):
        super().__init__()
        self.start = (finite("gamma1", gamma1, SINGLE), finite("gamma2", gamma2, SINGLE))
        add_gain(self, "gamma1", gamma1, trained)
        add_gain(self, "gamma2", gamma2, trained)

    def forward(self) -> tuple[Tensor, Tensor]:
        """gamma1 and gamma2. Call the module, not its attributes: tools that offload or shard weights work through hooks of the call."""
        return self.gamma1, self.gamma2

    def scalars(self) -> tuple[Tensor, ...]:
        return self.gamma1, self.gamma2

    def set_shaping(self, share: float) -> None:
        for gamma, start in zip(self.scalars(), self.start, strict=True):
            nn.init.constant_(gamma, share * start)


def has_gains(attention: nn.Module) -> bool:
    """Does this attention have gains? They may be inside a wrapper, such as those of PEFT or of sharding."""
    shaping = getattr(attention, "shaping", None)
    return isinstance(shaping, nn.Module) and any(isinstance(part, AttentionShaping) for part in shaping.modules())


class QKGains(nn.Module):
    """The trained gains of QK-norm: a vector for queries and one for keys, shared by the heads. They start at 1."""

    def __init__(self, key_width: int):
        super().__init__()
        self.query, self.key = (nn.Parameter(torch.ones(key_width)) for _ in range(2))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.query)
        nn.init.ones_(self.key)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        # Gains may have a higher precision than the tokens; cast the products back.
        return (q * self.query).to(q.dtype), (k * self.key).to(k.dtype)


class ShapedSelfAttention(nn.Module):
    r"""Multi-head self-attention $[A_h X W^V_h]_h W^O$ with $A = \gamma_1 I + \text{softmax} - \gamma_2\,\text{softmax}(B)$
    (Eq. shaped-attention-train).

    Weights start with variance 1/width, as the theory has them. The theory's temperature $\tau = \tau_0\sqrt{n n_k}$ is
    $\tau_0\sqrt{n}$ times the usual one; that factor is in the initial queries and keys, whose variance is $n^{-3/2}/\tau_0$, or,
    with `fold=False`, in the scale of the logits.

    QK-norm divides each head's queries and keys by their root mean square (`rms_norm`). The logits are then
    $\hat q\cdot\hat k/(\tau_0\sqrt{n n_k})$. Normalised queries and keys do not depend on the scale of their weights, so the temperature is
    always in the scale of the logits: `fold` changes nothing, and the weights start with variance 1/width.

    Args:
        width, heads: n and the number of heads, which must divide it.
        key_width: features of each head's queries and keys; width/heads by default.
        tau0: temperature; 1 by default. Plain attention has the usual one, width^-1/2; with QK-norm a tau0 that is given holds there too,
            for what Recover leaves.
        causal: a token sees itself and what came before it.
        fold: put the temperature into the initial weights (the default; learning rates need no change) or into the scale.
        dropout: of the softmax; identity and centring are not dropped.
        schedule: gamma1 and gamma2 are parameters if it learns them, buffers else.
        shaped: False for softmax attention at the usual temperature, without identity and centring.
        qk_norm, qk_gain: normalise queries and keys; multiply them by trained vectors then.
    """

    shaping: AttentionShaping | None
    qk_eps: float | None
    """What QK-norm adds to the mean squares; None without QK-norm."""
    qk_gains: QKGains | None
    qkv: nn.Module | None

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_width: int | None = None,
        tau0: float | None = None,
        causal: bool = False,
        fold: bool = True,
        dropout: float = 0.0,
        schedule: Schedule | None = None,
        shaped: bool = True,
        qk_norm: bool = False,
        qk_gain: bool = False,
    ):
        super().__init__()
        width, heads = whole_number("width", width), whole_number("heads", heads)
        if width % heads:
            raise ValueError(f"heads must divide the width, {width}, got {heads}")
        tau0 = None if tau0 is None else positive("tau0", tau0, SINGLE)
        for name, value in {"causal": causal, "fold": fold, "shaped": shaped, "qk_norm": qk_norm, "qk_gain": qk_gain}.items():
            check_bool(name, value)
        check_qk_gain(qk_norm, qk_gain)
        dropout = in_range("dropout", dropout, 0.0, 1.0)
        key_width = width // heads if key_width is None else whole_number("key_width", key_width)
        self.heads, self.is_causal, self.dropout = heads, causal, dropout
        extra = (1.0 if tau0 is None else tau0) * math.sqrt(width) if shaped or (qk_norm and tau0 is not None) else 1.0
        fold = fold and not qk_norm
        self.scale = key_width**-0.5 if fold else key_width**-0.5 / extra
        std = (width * extra) ** -0.5 if fold else width**-0.5
        self.query, self.key = (make_linear(width, heads * key_width, std) for _ in range(2))
        self.value, self.output = (make_linear(width, width, width**-0.5) for _ in range(2))
        self.shaping = AttentionShaping(trained=check_schedule(schedule).learns) if shaped else None
        self.qk_eps = RMS_EPS if qk_norm else None
        self.qk_gains = QKGains(key_width) if qk_gain else None
        self.register_module("qkv", None)
        self.splits = (heads * key_width, heads * key_width, width)

    def join(self, qkv: nn.Module) -> None:
        """Replaces the three layers of queries, keys and values by one that computes all of them, for a training loop."""
        del self.query, self.key, self.value
        self.qkv = qkv

    def forward(self, x: Tokens, attn_mask: Tensor | None = None, attend: Attend | None = None, rotation: Rotation | None = None) -> Tokens:
        """`attn_mask` as in `shaped_attention`: key padding is [batch, 1, 1, m], True where a token may be attended to.

        `attend` replaces the attention of queries, keys and values, for example to use a cache. It gets normalised and rotated
        queries and keys. `rotation` is that of the tokens' positions, for rotary positions.
        """
        if self.qkv is None:
            features = self.query(x), self.key(x), self.value(x)
        else:
            qkv = self.qkv(x)
            if attend is None and attn_mask is None and rotation is None and self.fits_short_kernel(qkv):
                gamma1, gamma2 = (None, None) if self.shaping is None else self.shaping()
                return self.output(short_attention.attention(qkv, gamma1, gamma2, self.heads, self.scale, self.qk_eps))
            features = qkv.split(self.splits, -1)
        q, k, v = (feature.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for feature in features)
        q, k = self.transform(q, k, rotation)
        mixed = self.mix(q, k, v, attn_mask) if attend is None else attend(self, q, k, v, attn_mask)
        return self.output(mixed.transpose(-2, -3).flatten(-2))

    def transform(self, q: Tensor, k: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """Queries and keys between their projections and the logits: normalised, multiplied by trained gains, rotated, each if wanted."""
        if self.qk_eps is not None:
            q, k = rms_norm(q, self.qk_eps), rms_norm(k, self.qk_eps)
        if self.qk_gains is not None:
            q, k = self.qk_gains(q, k)
        return (q, k) if rotation is None else (rotate(q, rotation), rotate(k, rotation))

    def fits_short_kernel(self, x: Tensor) -> bool:
        """Does `kernels.short_attention` support these tokens? It has no masks, no rotary positions and no gains of QK-norm."""
        return not self.is_causal and self.qk_gains is None and self._is_simple() and short_attention.fits(x, self.splits[0] // self.heads)

    def fits_long_kernel(self, x: Tensor) -> bool:
        """Does `kernels.long_attention` support these tokens? It has all of these, and takes fewer widths."""
        return self._is_simple() and long_attention.fits(x, self.splits[0] // self.heads)

    def _is_simple(self) -> bool:
        """Is it without dropout, and are q, k and v of one width?"""
        return (self.dropout == 0.0 or not self.training) and len(set(self.splits)) == 1

    def mix(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
        """`shaped_attention` with the module's gains, scale and dropout."""
        gamma1, gamma2 = (0.0, 0.0) if self.shaping is None else self.shaping()
        dropout = self.dropout if self.training else 0.0
        return shaped_attention(
            q, k, v, gamma1=gamma1, gamma2=gamma2, scale=self.scale, is_causal=self.is_causal, attn_mask=attn_mask, dropout_p=dropout
        )


def check_qk_gain(qk_norm: bool, qk_gain: bool) -> None:
    if qk_gain and not qk_norm:
        raise ValueError(f"qk_gain must be False without qk_norm, whose gain it is, got {qk_gain}")


class ShapedFeedForwardBlock(Shapeable):
    r"""$\sigma_s(X W^{\text{pre}})\,W^{\text{post}}$ (Eq. resnet).

    Args:
        width, hidden: n and the width inside; 4·width by default.
        c_minus: the negative slope of the shaped ReLU starts at 1 + c_minus/sqrt(width); its positive slope is 1.
        schedule: the activation's slope is a parameter if it learns it, a buffer else.
        shaped: False for the plain activation.
        activation: replaces the shaped ReLU, for example `ShapedGELU()`; `c_minus` must not be given then.
    """

    slope: Tensor | None
    """The gain that shapes the activation; None if plain. The mean slope at 0 is (1 + slope)/2. For the ReLU it is the negative slope."""

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        *,
        c_minus: float = C_MINUS,
        schedule: Schedule | None = None,
        shaped: bool = True,
        activation: ShapedActivation | None = None,
    ):
        super().__init__()
        self.width = width = whole_number("width", width)
        hidden = 4 * width if hidden is None else whole_number("hidden", hidden)
        c_minus = finite("c_minus", c_minus, SINGLE)
        if activation is not None and c_minus != C_MINUS:
            raise ValueError(f"c_minus must be {C_MINUS}, its default, beside an activation, which has a shape of its own, got {c_minus}")
        self.activation = ShapedReLU.from_config(c_minus) if activation is None else activation
        check_activation(self.activation)
        check_bool("shaped", shaped)
        self.start = self.activation.start(width) if shaped else 0.0
        function = self.activation.at(width) if shaped else self.activation.plain
        self.pre = make_linear(width, hidden, width**-0.5)
        self.post = make_linear(hidden, width, math.sqrt(function.normaliser() / hidden))
        if shaped:
            add_gain(self, "slope", self.start, check_schedule(schedule).learns)
        else:
            self.slope = None

    def forward(self, x: Tokens) -> Tokens:
        hidden = self.pre(x)
        return self.post(self.activation.plain(hidden) if self.slope is None else self.activation.apply(hidden, self.slope, self.width))

    def scalars(self) -> tuple[Tensor, ...]:
        return () if self.slope is None else (self.slope,)

    def set_shaping(self, share: float) -> None:
        if self.slope is not None:
            nn.init.constant_(self.slope, share * self.start)


def add_gain(module: nn.Module, name: str, start: float, trained: bool) -> None:
    """Adds a scalar to the module: a parameter if it is trained, else a buffer. Both are saved with the weights.

    Its shape is [1]: PyTorch cannot shard parameters without dimensions.
    """
    value = torch.tensor([float(start)])
    if trained:
        module.register_parameter(name, nn.Parameter(value))
    else:
        module.register_buffer(name, value)
