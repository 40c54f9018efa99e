"""Blocks of Transformers in use with explicit random weights, written from their definitions, head by head.

Tests check the weightless simulation against them. Pairs (std, bias) are the standard deviations of a matrix and of its bias; the
keyword arguments `draw` go to `draw_weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shaped.nn.functional import attention_matrix, logit_bias
from shaped.nn.networks import draw_weights

X = Float[Tensor, "*batch m n"]
Deviations = tuple[float, float]


class RandomLinear(nn.Module):
    """x W + b, both normal."""

    def __init__(self, rows: int, columns: int, deviations: Deviations, **draw: Any):
        super().__init__()
        self.deviations = deviations
        self.weight = draw_weights(rows, columns, **draw)
        self.bias = draw_weights(1, columns, **draw) if deviations[1] else None

    def forward(self, x: Tensor) -> Tensor:
        std, bias = self.deviations
        y = std * (x @ self.weight)
        return y if self.bias is None else y + bias * self.bias


class RandomNorm(nn.Module):
    """LayerNorm, RMSNorm or DyT, with one gain for all features."""

    def __init__(self, kind: str, width: int, eps: float | None, gain: float, alpha: float | None, dtype: torch.dtype | None = None):
        super().__init__()
        self.kind, self.eps, self.alpha = kind, eps, alpha
        self.gain: Tensor
        self.register_buffer("gain", torch.full((width,), gain, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            assert self.eps is not None
            return nn.functional.layer_norm(x, self.gain.shape, self.gain, eps=self.eps)
        if self.kind == "rms":
            return nn.functional.rms_norm(x, self.gain.shape, self.gain, eps=self.eps)
        assert self.alpha is not None
        return self.gain * torch.tanh(self.alpha * x)


class RandomSelfAttention(nn.Module):
    """Softmax attention, head by head."""

    def __init__(
        self,
        n: int,
        heads: int,
        key_heads: int,
        width: int,
        query: Deviations,
        key: Deviations,
        value: Deviations,
        output: Deviations,
        *,
        scale: float,
        mask: str | Tensor | None,
        window: int | None,
        softcap: float | None,
        qk_norm: Callable[..., nn.Module] | None,
        qk_norm_over: str,
        rope: Sequence[float] | None,
        gammas: tuple[float, float],
        gamma: float,
        **draw: Any,
    ):
        super().__init__()
        self.heads, self.key_heads, self.width, self.scale, self.mask, self.window = heads, key_heads, width, scale, mask, window
        self.softcap, self.rope, self.gammas, self.gamma, self.over = softcap, rope, gammas, gamma, qk_norm_over
        self.query = RandomLinear(n, heads * width, query, **draw)
        self.key, self.value = RandomLinear(n, key_heads * width, key, **draw), RandomLinear(n, key_heads * width, value, **draw)
        self.output = RandomLinear(heads * width, n, output, **draw)
        self.query_norm = self.key_norm = None
        if qk_norm is not None:
            widths = (width, width) if qk_norm_over == "head" else (heads * width, key_heads * width)
            self.query_norm, self.key_norm = (qk_norm(wide, dtype=draw.get("dtype")) for wide in widths)

    def forward(self, x: X) -> X:
        values = self.value(x).split(self.width, -1)
        mixed = []
        for head, logits in enumerate(self.logits(x)):
            mixed.append(attention_matrix(logits, self.bias(head, x), *self.gammas) @ values[self.group(head)])
        return self.output(self.gamma * torch.cat(mixed, -1))

    def logits(self, x: X) -> list[Tensor]:
        """Of each head, before the bias."""
        queries, keys = self.split(self.query(x), self.query_norm), self.split(self.key(x), self.key_norm)
        found = [self.scale * query @ keys[self.group(head)].mT for head, query in enumerate(queries)]
        return found if self.softcap is None else [self.softcap * torch.tanh(logits / self.softcap) for logits in found]

    def group(self, head: int) -> int:
        """The head of the keys and values that this head uses."""
        return head * self.key_heads // self.heads

    def split(self, x: Tensor, norm: nn.Module | None) -> list[Tensor]:
        """The features of each head, normalised and rotated."""
        if norm is not None and self.over == "all":
            x = norm(x)
        heads = x.split(self.width, -1)
        if norm is not None and self.over == "head":
            heads = [norm(head) for head in heads]
        return [head if self.rope is None else self.rotate(head, self.rope) for head in heads]

    @staticmethod
    def rotate(x: Tensor, frequencies: Sequence[float]) -> Tensor:
        """Features 2i and 2i + 1 as a complex number, times exp(i·place·frequency): written apart from `functional.rotate`, to test it."""
        wide = 2 * len(frequencies)
        place = torch.arange(x.shape[-2], dtype=torch.float64, device=x.device)[:, None]
        turn = torch.exp(1j * place * torch.tensor(frequencies, dtype=torch.float64, device=x.device))
        pairs = torch.view_as_complex(x[..., :wide].double().unflatten(-1, (-1, 2)).contiguous())
        return torch.cat([torch.view_as_real(pairs * turn).flatten(-2).to(x), x[..., wide:]], -1)

    def bias(self, head: int, x: X) -> Tensor:
        m = x.shape[-2]
        B = logit_bias(self.mask, m, x)
        B = B[head].clone() if B.ndim == 3 else B
        if self.window is not None:
            for place in range(m):
                B[place, : max(0, place + 1 - self.window)] = -torch.inf
        return B


class RandomMLP(nn.Module):
    """A feed-forward layer, gated or not."""

    def __init__(
        self, n: int, hidden: int, inner: Deviations, outer: Deviations, activation: Callable[[Tensor], Tensor], gated: bool, **draw: Any
    ):
        super().__init__()
        self.activation = activation
        self.first, self.second = RandomLinear(n, hidden, inner, **draw), RandomLinear(hidden, n, outer, **draw)
        self.gate = RandomLinear(n, hidden, inner, **draw) if gated else None

    def forward(self, x: X) -> X:
        hidden = self.activation(self.first(x))
        return self.second(hidden if self.gate is None else hidden * self.gate(x))


class RandomBlock(nn.Module):
    """x' = after(lam x + gamma post(sum of the branches of norm(x)))."""

    def __init__(
        self,
        branches: Sequence[nn.Module],
        norms: Sequence[nn.Module | None],
        post: nn.Module | None,
        after: nn.Module | None,
        lam: float,
        gamma: float,
    ):
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.norms = nn.ModuleList(nn.Identity() if norm is None else norm for norm in norms)
        self.post, self.after = (nn.Identity() if norm is None else norm for norm in (post, after))
        self.lam, self.gamma = lam, gamma

    def forward(self, x: X) -> X:
        update = torch.zeros_like(x)
        for branch, norm in zip(self.branches, self.norms, strict=True):
            update = update + branch(norm(x))
        return self.after(self.lam * x + self.gamma * self.post(update))
