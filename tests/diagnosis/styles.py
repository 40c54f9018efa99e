"""Models in styles of many repositories, in which neither modules nor their arguments say where the residual stream is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from plain_models import WIDTH, Fused, PreNormBlock, Residual, Written, make_feedforward
from torch import Tensor, nn
from torch.nn import functional as F

from shaped.testing.stats import generator

DEPTH = 3
SHAPES = {"windows": (2, 2, 6, WIDTH), "images": (2, WIDTH, 3, 4), "tokens before sequences": (5, 2, WIDTH)}


class Looped(Written):
    """Calls its layers one after the other. `step` is what a model does with a layer."""

    def __init__(self, make: Callable[[], nn.Module], step: Callable[..., Tensor] | None = None):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(DEPTH))
        self.norm, self.gain, self.step = nn.LayerNorm(WIDTH), nn.Parameter(torch.full((WIDTH,), 0.3)), step
        nn.init.ones_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x).mean(1)

    def run(self, x: Tensor) -> Tensor:
        first = x
        self.keep(x)
        for layer in self.layers:
            x = self.keep(self.step(self, layer, x, first) if self.step else layer(x))
        return x


STEPS: dict[str, Callable[..., Tensor]] = {
    "shared norms around a branch": lambda model, layer, x, first: x + model.norm(layer(model.norm(x))),
    "Post-LN in the model": lambda model, layer, x, first: model.norm(x + layer(x)),
    "a gated sum": lambda model, layer, x, first: torch.lerp(x, layer(x), model.gain),
    "gains of the branch": lambda model, layer, x, first: torch.addcmul(x, model.gain, layer(x)),
    "gains of the stream": lambda model, layer, x, first: (1 - model.gain) * x + model.gain * layer(x),
    "a difference": lambda model, layer, x, first: x - layer(x),
    "transposed for the layer": lambda model, layer, x, first: x + layer(x.transpose(0, 1)).transpose(0, 1),
    "a sum in place": lambda model, layer, x, first: x.clone().add_(layer(x)),
    "the normed stream again": lambda model, layer, x, first: add(x, layer(h := model.norm(x)), h),
    "a sum into a buffer": lambda model, layer, x, first: write(torch.zeros_like(x), x + layer(x)),
}


def add(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return x + y + h


def write(buffer: Tensor, x: Tensor) -> Tensor:
    buffer[:, :2], buffer[:, 2:] = x[:, :2], x[:, 2:]
    return buffer


class TokensFirst(nn.Module):
    """[tokens, batch, features], and its own softmax."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)) for part in self.qkv(x).chunk(3, -1))
        shares = (torch.einsum("ibhd,jbhd->bhij", q, k) / 3.0).softmax(-1)
        return torch.einsum("bhij,jbhd->ibhd", shares, v).flatten(2)


class InSlices(TokensFirst):
    """Writes the softmax of each half of the batch into the logits, to save memory."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)) for part in self.qkv(x).chunk(3, -1))
        shares = torch.einsum("bihd,bjhd->bhij", q, k) / 3.0
        for rows in (slice(0, 1), slice(1, 2)):
            shares[rows] = shares[rows].softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", shares, v).flatten(2)


class Parallel(nn.Module):
    """As in GPT-J: the two branches are added first."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.feedforward = nn.LayerNorm(WIDTH), Fused(), make_feedforward()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.feedforward(h) + self.attention(h) + x


class ZippedParallel(Written):
    def __init__(self):
        super().__init__()
        self.attentions = nn.ModuleList(Fused() for _ in range(DEPTH))
        self.feedforwards = nn.ModuleList(make_feedforward() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.keep(x)
        for attention, feedforward in zip(self.attentions, self.feedforwards, strict=True):
            h = self.norm(x)
            x = self.keep(x + attention(h) + feedforward(h))
        return self.norm(x)


class Cross(nn.Module):
    """Takes what it attends to before its tokens, in the same shape."""

    def __init__(self):
        super().__init__()
        self.attention, self.cross = Fused(), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.feedforward = make_feedforward()

    def forward(self, memory: Tensor, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        x = x + self.cross(x, memory, memory)[0]
        return x + self.feedforward(x)


class ClassToken(Written):
    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Parameter(torch.randn(1, 1, WIDTH, generator=generator(81))), nn.Linear(WIDTH, 3)
        self.layers = nn.Sequential(*(PreNormBlock(Fused()) for _ in range(DEPTH)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.keep(torch.cat([self.token.expand(len(x), -1, -1), x], 1))
        for layer in self.layers:
            x = self.keep(layer(x))
        return self.head(x[:, 0])


class Window(nn.Module):
    """Four windows of three tokens, in images [batch, height, width, features]."""

    def __init__(self):
        super().__init__()
        self.attention, self.feedforward = Fused(), make_feedforward()

    def forward(self, x: Tensor) -> Tensor:
        windows = x.unflatten(2, (2, 3)).flatten(0, 2)
        x = x + self.attention(windows).unflatten(0, (len(x), 2, 2)).flatten(2, 3)
        return x + self.feedforward(x)


class Map(nn.Module):
    """Attends to the places of an image, [batch, features, height, width]."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Conv2d(WIDTH, 3 * WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.flatten(2).unflatten(1, (2, -1)).mT for part in self.qkv(x).chunk(3, 1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).mT.flatten(1, 2).view_as(x))


class Images(Looped):
    def keep(self, x: Tensor) -> Tensor:
        self.streams.append(x.detach().flatten(2).mT)
        return x


class Functional(Written):
    """Layers have no modules: one part with three calls of attention."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH, generator=generator(82 + i)) / 4.0 for i in range(DEPTH))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        self.keep(x)
        for weight in self.weights:
            x = x + F.scaled_dot_product_attention(x @ weight, x, x) @ weight
            x = x + F.gelu(x @ weight)
        self.keep(x)
        return self.head(x)


class Deferred(nn.Module):
    """Returns its last branch and the stream, which the next layer adds up."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.feedforward = nn.LayerNorm(WIDTH), Fused(), make_feedforward()

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + h
        x = x + self.attention(self.norm(x))
        return self.feedforward(x), x


class Weights(nn.Module):
    """Returns its attention before its tokens."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        attended, shares = self.attention(x, x, x, average_attn_weights=False)
        return shares, x + attended


class Turned(nn.Module):
    """Only its attention has tokens before sequences."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        return x + self.attention(y, y, y)[0].transpose(0, 1)


class Streams(nn.Module):
    """Three streams (hyper-connections): [batch, tokens, streams, features]."""

    def __init__(self):
        super().__init__()
        self.branch, self.mix = Fused(), nn.Parameter(torch.eye(3) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("kl,bmln->bmkn", self.mix, x) + self.branch(x.mean(2))[:, :, None]


class Low(nn.Module):
    """A linear map and a trained one of rank 2."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = Low(), Low(), Low()

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


class Hidden(torch.autograd.Function):
    """PyTorch shows no mode what it computes."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return x * 2.0

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2.0


class HiddenOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Fused()

    def forward(self, x: Tensor) -> Tensor:
        return Hidden.apply(self.attention(x))


class LongSkip(Looped):
    """Adds its input again at the end, as networks for images do."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.run(x)


def call_tuple(index: int) -> Callable[..., Tensor]:
    return lambda model, layer, x, first: layer(x)[index]


class Handed(Written):
    """What a layer leaves to the next one, the model adds up at the end: another place of the code."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Deferred() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        self.keep(x)
        for layer in self.layers:
            h, x = layer(h, x)
            self.keep(x + h)
        return x + h


class Pooled(nn.Module):
    """Layers that are lists within a module, and attention of the model's own behind it."""

    def __init__(self):
        super().__init__()
        self.encoder = Looped(lambda: nn.ModuleList([Fused(), make_feedforward()]), lambda model, pair, x, first: x + pair[1](pair[0](x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)[:, None]
        return F.scaled_dot_product_attention(x, x, x)


MODELS: dict[str, Callable[[], Written]] = {
    **{name: lambda step=step: Looped(Fused, step) for name, step in STEPS.items()},
    "a difference to whole blocks": lambda: Looped(lambda: PreNormBlock(Fused()), STEPS["a gated sum"]),
    "parallel branches": lambda: Looped(Parallel),
    "zipped parallel branches": ZippedParallel,
    "memory before tokens": lambda: Looped(Cross, lambda model, layer, x, first: layer(first.tanh(), x)),
    "a class token": ClassToken,
    "windows": lambda: Looped(Window),
    "images": lambda: Images(Map),
    "tokens before sequences": lambda: Looped(lambda: PreNormBlock(TokensFirst())),
    "attention before tokens": lambda: Looped(Weights, call_tuple(1)),
    "tokens first within the attention": lambda: Looped(Turned),
    "functions": Functional,
    "a long skip": lambda: LongSkip(lambda: PreNormBlock(Fused())),
    "low rank": lambda: Looped(lambda: PreNormBlock(LowRank())),
    "a function that PyTorch does not show": lambda: Looped(lambda: Residual(HiddenOutput())),
}
