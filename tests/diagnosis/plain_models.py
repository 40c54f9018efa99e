"""Plain PyTorch models, each written in another way. They keep their logits and streams, for the check by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shaped.nn.functional import shaped_attention

WIDTH, HEADS = 16, 2


class EinsumAttention(nn.Module):
    """Computes its softmax itself, with the mask of a decoder, as in many repositories."""

    def __init__(self, seen: list[Tensor]):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * 3.0
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -1e9)
        self.seen.append(scores.detach().masked_fill(future, -torch.inf))
        return self.out((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.ReLU(inplace=True), nn.Linear(24, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class ListOfLists(nn.Module):
    """Layers are lists that are never called; the residual sums are in the model."""

    def __init__(self, depth: int = 3):
        super().__init__()
        self.logits: list[Tensor] = []
        self.streams: list[Tensor] = []
        self.layers = nn.ModuleList(nn.ModuleList([EinsumAttention(self.logits), FeedForward()]) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.streams.append(x.detach().clone())
        for attention, feedforward in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = x + attention(x)
            x = x + feedforward(x)
            self.streams.append(x.detach().clone())
        return self.norm(x)


class Block(nn.Module):
    """One head without a dimension of its own, grouped in no list."""

    def __init__(self, logits: list[Tensor]):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.logits = logits

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        self.logits.append((q @ k.mT * 0.7 + bias)[:, None].detach())
        return x + F.gelu(F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.7))


class Attributes(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits: list[Tensor] = []
        self.streams: list[Tensor] = []
        self.first, self.second = Block(self.logits), Block(self.logits)

    def forward(self, x: Tensor) -> Tensor:
        bias = -0.3 * torch.arange(x.shape[1], dtype=x.dtype).expand(x.shape[1], -1)
        one = self.first(x, bias)
        two = self.second(one, bias)
        self.streams += [x, one.detach(), two.detach()]
        return two


class CausalBlock(nn.Module):
    """Grouped queries, and one key more than queries: PyTorch's causal mask has query 0 at key 0."""

    def __init__(self, logits: list[Tensor]):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        self.logits = logits

    def forward(self, x: Tensor) -> Tensor:
        more = torch.cat([x, x[:, :1]], 1)
        q, k, v = (part(of).unflatten(-1, (-1, 4)).transpose(1, 2) for part, of in ((self.q, x), (self.k, more), (self.v, more)))
        scores = (q @ k.repeat_interleave(2, 1).mT / 2).detach()
        self.logits.append(scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + attended.transpose(1, 2).flatten(2)


class CausalGrouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits: list[Tensor] = []
        self.streams: list[Tensor] = []
        self.blocks = nn.Sequential(CausalBlock(self.logits), CausalBlock(self.logits))

    def forward(self, x: Tensor) -> Tensor:
        one = self.blocks[0](x)
        two = self.blocks[1](one)
        self.streams += [x, one.detach(), two.detach()]
        return two


class GroupedShaped(nn.Module):
    """Shaped attention with grouped queries, padding that the model finds itself, a bias, and more keys than queries in a cache."""

    def __init__(self, logits: list[Tensor]):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        self.logits = logits

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = q @ k.repeat_interleave(2, 1).mT / 2 + torch.where(allowed, 0.1, -torch.inf)
        self.logits.append(scores.detach())
        attended = shaped_attention(q, k, v, attn_mask=torch.where(allowed, 0.1, -torch.inf).to(x.dtype))
        return 0.8 * x + 0.6 * attended.transpose(1, 2).flatten(2)


class PaddedShaped(nn.Module):
    """Zeros in the first feature mark padding."""

    def __init__(self):
        super().__init__()
        self.logits: list[Tensor] = []
        self.streams: list[Tensor] = []
        self.blocks = nn.ModuleList(GroupedShaped(self.logits) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        allowed = (x[..., 0] != 0)[:, None, None]
        self.streams.append(x.detach())
        for block in self.blocks:
            x = block(x, allowed)
            self.streams.append(x.detach())
        return x


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def make_feedforward() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))


class PreNormBlock(nn.Module):
    def __init__(self, attention: nn.Module):
        super().__init__()
        self.norm, self.attention, self.feedforward = nn.LayerNorm(WIDTH), attention, make_feedforward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feedforward(x)


class Residual(nn.Module):
    def __init__(self, branch: nn.Module):
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Written(nn.Module):
    """Keeps its stream, for the check by hand."""

    def __init__(self):
        super().__init__()
        self.streams: list[Tensor] = []
        self.drop = nn.Dropout(0.5)

    def keep(self, x: Tensor) -> Tensor:
        self.streams.append(x.detach().clone())
        return x
