"""Models whose layers are not modules that take the stream and return it: the numbers are those of the stream all the same."""

from collections.abc import Callable

import pytest
import torch
from by_hand import check_tokens
from plain_models import WIDTH, Fused, PreNormBlock, Residual, Written, make_feedforward
from torch import Tensor, nn

import shaped
from shaped.diagnosis import observe
from shaped.testing.stats import generator

DEPTH = 3
X = torch.randn(2, 5, WIDTH, generator=generator(61))


class Head(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, WIDTH // 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.query(x) @ self.key(x).mT).softmax(-1) @ self.value(x)


class Heads(nn.Module):
    """Heads that are modules of a list, as in many lectures: each sees all features, or its share of them."""

    def __init__(self, shares: int = 1):
        super().__init__()
        self.heads, self.shares, self.out = nn.ModuleList(Head(WIDTH // shares) for _ in range(2)), shares, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        given = x.chunk(2, -1) if self.shares == 2 else (x, x)
        return self.out(torch.cat([head(one) for head, one in zip(self.heads, given, strict=True)], -1))


class Blocks(Written):
    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(PreNormBlock(make()) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        self.keep(x)
        for block in self.blocks:
            x = self.keep(block(x))
        return x


class Added(Blocks):
    """The sums are in the model."""

    def forward(self, x: Tensor) -> Tensor:
        self.keep(x)
        for block in self.blocks:
            x = self.keep(x + 0.5 * self.drop(block(x.tanh())))
        return x.mean(1)


class Summed(Blocks):
    """What the layers return is the stream; the model also adds it to what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        total = self.keep(x)
        for block in self.blocks:
            x = self.keep(block(x))
            total = total + x
        return total


class Zipped(Written):
    """A list of each kind of module, with one dropout for all."""

    def __init__(self):
        super().__init__()
        self.attentions, self.feedforwards = nn.ModuleList(Fused() for _ in range(DEPTH)), nn.ModuleList()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(DEPTH))
        self.feedforwards.extend(make_feedforward() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        self.keep(x)
        for attention, norm, feedforward in zip(self.attentions, self.norms, self.feedforwards, strict=True):
            x = x + self.drop(attention(norm(x)))
            x = self.keep(x + self.drop(feedforward(x)))
        return x[:, 0]


class Pairs(Written):
    """Lists that are never called. What follows the last one does not have the stream."""

    def __init__(self, residual: bool):
        super().__init__()
        pairs = ((Fused(), make_feedforward()) for _ in range(DEPTH))
        self.layers = nn.ModuleList(nn.ModuleList(Residual(part) if residual else part for part in pair) for pair in pairs)
        self.residual, self.head = residual, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.keep(x)
        for attention, feedforward in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = attention(x) if self.residual else x + self.drop(attention(x))
            x = self.keep(feedforward(x) if self.residual else x + self.drop(feedforward(x)))
        return self.head(x[:, 0])


class Again(Written):
    """One layer that is no item of a list, called again and again."""

    def __init__(self):
        super().__init__()
        self.layer = PreNormBlock(Fused())

    def forward(self, x: Tensor) -> Tensor:
        self.keep(x)
        for _ in range(DEPTH):
            x = self.keep(self.layer(x))
        return x


MODELS: dict[str, tuple[Callable[[], Written], str, int]] = {
    "heads": (lambda: Blocks(Heads), "blocks.2", 9),
    "heads with a share of the features": (lambda: Blocks(lambda: Heads(2)), "blocks.2", 9),
    "branches": (lambda: Added(Fused), "blocks.2", 3),
    "streams that are added up": (lambda: Summed(Fused), "blocks.2", 3),
    "zipped lists": (Zipped, "attentions+feedforwards+norms.2", 3),
    "pairs": (lambda: Pairs(False), "layers.2", 3),
    "pairs with residual sums": (lambda: Pairs(True), "layers.2", 3),
    "one layer": (Again, "layer (call 3)", 3),
}
"""How a model is written: the model, the name of its last layer, and how many weight matrices that has."""


@pytest.mark.parametrize("way", MODELS)
def test_the_stream_is_found_however_the_layers_are_written(way: str):
    make, name, matrices = MODELS[way]
    torch.manual_seed(62)
    model = make()
    (stack,) = observe(model, X).stacks
    assert len(stack.layers) == DEPTH
    for found, stream in zip((stack.entering, *(layer.tokens for layer in stack.layers)), model.streams, strict=True):
        check_tokens(found, stream)
    last = stack.layers[-1]
    assert (last.name, len(last.gradients)) == (name, matrices)
    assert last.dead == pytest.approx(0.0)
    model.drop.p = 0.0
    with shaped.watch(model, every=1) as watcher:
        loss = model(X).square().mean()
        loss.backward()
        watcher.step(loss)
    for layer in stack.layers:
        assert watcher.rows[0].quantities["correlation"][layer.name] == pytest.approx(layer.tokens.correlation, abs=1e-5)


def test_matrices_of_zipped_lists_have_one_name_in_all_layers():
    torch.manual_seed(63)
    (stack,) = observe(Zipped(), X).stacks
    assert stack.name == "attentions+feedforwards+norms"
    for layer in stack.layers:
        assert set(layer.gradients) == {"attentions.qkv.weight", "feedforwards.0.weight", "feedforwards.2.weight"}
        assert set(layer.attention) == {"attentions"}
