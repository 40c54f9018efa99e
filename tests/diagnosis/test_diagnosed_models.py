"""Every quantity of `observe` against the same quantity by hand, for transformers' families and plain PyTorch models."""

import copy
from typing import Any

import pytest
import torch
from by_hand import check_attention, check_gradients, check_tokens
from families import FAMILIES, watch_stream  # pyright: ignore[reportMissingImports] (in tests/hf)
from plain_models import WIDTH, Attributes, CausalGrouped, ListOfLists, PaddedShaped
from torch import Tensor, nn
from transformers import AutoModel

from shaped.diagnosis import observe
from shaped.diagnosis.one_pass.losses import project
from shaped.testing.stats import generator

STOCK = ("gpt2", "bert", "roberta", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt_neox", "vit", "modernbert", "olmo2")
MASK = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])


def observe_eagerly(model: Any, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Tensor], list[Tensor]]:
    """The output, the inputs of each softmax over 4 dimensions, and the stream, of a model that materialises its attention."""
    logits: list[Tensor] = []
    plain = torch.nn.functional.softmax

    def softmax(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.ndim == 4:
            logits.append(x.detach())
        return plain(x, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)
    with watch_stream(model, model.config.num_hidden_layers) as stream:
        output = model(**inputs)
    monkeypatch.undo()
    return output, logits, stream


@pytest.mark.parametrize("name", STOCK)
def test_families_of_transformers(name: str, monkeypatch):
    config = FAMILIES[name](16, 2)
    torch.manual_seed(3)
    model: Any = AutoModel.from_config(config, attn_implementation="eager" if name == "gemma2" else "sdpa").double().eval()
    if name == "vit":
        inputs, real = {"pixel_values": torch.randn(2, config.num_channels, *config.image_size, generator=generator(1)).double()}, None
    else:
        inputs, real = {"input_ids": torch.randint(3, 60, (2, 6), generator=generator(1)), "attention_mask": MASK}, MASK != 0
    seen = observe(model, inputs)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    output, logits, stream = observe_eagerly(eager, inputs, monkeypatch)
    project(output.last_hidden_state).backward()
    (stack,) = seen.stacks
    assert len(stack.layers) == len(logits) == 2
    for found, x in zip((stack.entering, *(layer.tokens for layer in stack.layers)), stream, strict=True):
        check_tokens(found, x, real)
    for layer, values in zip(stack.layers, logits, strict=True):
        (call,) = layer.attention.values()
        check_attention(call, values, real)
        assert layer.dead == 0.0
    check_gradients(stack.layers, eager)
    eager_again = observe(eager, inputs).stacks[0]
    for layer, values in zip(eager_again.layers, logits, strict=True):
        (call,) = layer.attention.values()
        check_attention(call, values, real)


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
