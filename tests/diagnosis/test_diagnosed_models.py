"""Every quantity of `observe` against the same quantity by hand, for transformers' families and plain PyTorch models."""

from typing import Any

import pytest
import torch
from by_hand import check_attention, check_gradients, check_tokens
from plain_models import WIDTH, Attributes, CausalGrouped, ListOfLists, PaddedShaped
from torch import Tensor, nn
from verify_families import STOCK, compare_family

from shaped.diagnosis import observe
from shaped.diagnosis.one_pass.losses import project
from shaped.testing.stats import generator


@pytest.mark.parametrize("name", STOCK)
def test_families_of_transformers(name: str):
    compare_family(name, width=16, depth=2, tokens=6)


@pytest.mark.parametrize("kind", [ListOfLists, Attributes, CausalGrouped, PaddedShaped])
def test_plain_models(kind: type[nn.Module]):
    torch.manual_seed(4)
    model: Any = kind().double()
    x = torch.randn(3, 5, WIDTH, generator=generator(2)).double()
    real = None
    if kind is PaddedShaped:
        x[1, 3:] = 0.0
        real = x[..., 0] != 0
    (stack,) = observe(model, x).stacks
    logits, streams = list(model.logits), list(model.streams)
    for found, values in zip((stack.entering, *(layer.tokens for layer in stack.layers)), streams, strict=True):
        check_tokens(found, values, real)
    for layer, values in zip(stack.layers, logits, strict=True):
        (call,) = layer.attention.values()
        check_attention(call, values, real)
    project(model(x)).backward()
    check_gradients(stack.layers, model)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("tokens", [5, 3])  # 3: as many as sequences
def test_pytorchs_own_encoder_in_both_layouts(batch_first: bool, tokens: int):
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, batch_first=batch_first)
    nn.init.constant_(layer.linear1.bias, -0.6)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    x = torch.randn(3, tokens, WIDTH, generator=generator(3)).double()
    padding = torch.zeros(3, tokens, dtype=torch.bool)
    padding[1:, 2:] = True
    (stack,) = observe(model, {"src": x if batch_first else x.transpose(0, 1), "src_key_padding_mask": padding}).stacks
    attention: Any = model.layers[0].self_attn
    q, k, _ = nn.functional.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
    q, k = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (q, k))
    logits = (q @ k.mT / 8**0.5).masked_fill(padding[:, None, None], -torch.inf)
    check_attention(stack.layers[0].attention["self_attn"], logits, ~padding)
    check_tokens(stack.entering, x, ~padding)
    block: Any = model.layers[0]
    attended = attention(*3 * [x if batch_first else x.transpose(0, 1)], key_padding_mask=padding)[0]
    units = block.linear1(block.norm1(x + (attended if batch_first else attended.transpose(0, 1))))
    dead = (units[~padding] <= 0).all(0).double().mean()
    assert stack.layers[0].dead == pytest.approx(float(dead))
    assert 0.0 < (units <= 0).flatten(0, 1).all(0).double().mean() < dead < 1.0  # padding makes some units alive


def test_multi_head_attention_that_returns_its_weights():
    """It then computes its softmax itself, over [batch · heads, Q, K]."""

    class Weighing(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            attended, weights = self.attention(x, x, x, average_attn_weights=False)
            self.weights = weights.detach()
            return x + attended

    torch.manual_seed(6)
    model: Any = nn.Sequential(Weighing(), Weighing()).double()
    (stack,) = observe(model, torch.randn(3, 5, WIDTH, generator=generator(4)).double()).stacks
    for layer, block in zip(stack.layers, model, strict=True):
        entropy = torch.special.entr(block.weights).sum(-1).mean((0, 2))
        assert layer.attention["attention"].entropy == pytest.approx(entropy.tolist(), rel=1e-5)


class OtherOrder(nn.Module):
    """Its logits are [batch, queries, heads, keys], or [heads, batch, queries, keys]; its softmax is a module."""

    def __init__(self, product: str, as_usual: str):
        super().__init__()
        self.query, self.softmax, self.product, self.as_usual = nn.Linear(WIDTH, WIDTH), nn.Softmax(dim=-1), product, as_usual

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        q, k = self.query(x).unflatten(-1, (2, -1)), x.unflatten(-1, (2, -1))
        usual = torch.einsum("bihd,bjhd->bhij", q, k).masked_fill(padding_mask[:, None, None], -torch.inf)
        self.logits = usual.detach()
        scores = torch.einsum(self.product, q, k)
        masked = torch.einsum(f"bhij->{self.as_usual}", padding_mask[:, None, None].expand_as(usual).double()) > 0
        A = torch.einsum(f"{self.as_usual}->bhij", self.softmax(scores.masked_fill(masked, -torch.inf)))
        return x + torch.einsum("bhij,bjhd->bihd", A, k).flatten(2)


@pytest.mark.parametrize("order", ["bhij", "bihj", "hbij"])
def test_logits_whose_heads_are_elsewhere(order: str):
    torch.manual_seed(7)
    model: Any = OtherOrder(f"bihd,bjhd->{order}", order).double()
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1:, 3:] = True
    (stack,) = observe(model, {"x": torch.randn(3, 5, WIDTH, generator=generator(5)).double(), "padding_mask": padding}).stacks
    (call,) = stack.layers[0].attention.values()
    assert len(call.entropy) == 2
    check_attention(call, model.logits, ~padding)
