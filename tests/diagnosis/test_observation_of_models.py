"""What `observe` leaves as it was, which layers it finds, and what it refuses."""

from typing import Any

import pytest
import torch
from plain_models import WIDTH, Attributes, ListOfLists
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AlbertConfig, AutoModel, AutoModelForSeq2SeqLM, SwinConfig, T5Config

from refusals import refused
from shaped.diagnosis import observe
from shaped.diagnosis.one_pass.quantities import count_dead_units, measure_tokens
from shaped.hf import ShapedConfig, ShapedForMaskedLM
from shaped.nn import ShapedEncoder
from shaped.testing.stats import generator

X = torch.randn(2, 5, WIDTH, generator=generator(21))


class Changing(nn.Module):
    """Changes its buffers and draws random numbers, whatever its mode."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.drop = ListOfLists(2), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.norm.train()(self.body(x).transpose(1, 2)).transpose(1, 2) + 1e-3 * torch.randn_like(x)
        if self.error:
            raise self.error
        return self.drop(x)


@pytest.mark.parametrize("error", [None, RuntimeError("a batch\nthat it cannot take"), KeyboardInterrupt()])
def test_the_model_stays_as_it_was(error: BaseException | None):
    torch.manual_seed(1)
    model = Changing()
    model.body.eval()
    model.error = error
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    flags = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.get_rng_state()
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            observe(model, X)
    elif error:
        with refused("batch", "Changing", "[2, 5, 16]", "a batch that it cannot take"):
            observe(model, X)
    else:
        observe(model, X)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is not None and bool((parameter.grad == 7.0).all()) for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.relu(X).shape == X.shape  # no mode is left behind: it would fail on a closed observation
    assert not torch.overrides._get_current_function_mode_stack()


def test_layers_of_models_of_every_form():
    """Encoder and decoder, one layer called three times, stages of changing width, and a model that is one layer."""
    ids = torch.randint(3, 30, (2, 6), generator=generator(22))
    sizes: dict[str, Any] = {
        "vocab_size": 30,
        "num_heads": 2,
        "num_layers": 2,
        "decoder_start_token_id": 0,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
    }
    t5 = observe(AutoModelForSeq2SeqLM.from_config(T5Config(**sizes)), {"input_ids": ids, "labels": ids})
    assert [stack.name for stack in t5.stacks] == ["encoder.block", "decoder.block"]
    assert [list(layer.attention) for layer in t5.stacks[1].layers] == 2 * [["layer.0.SelfAttention", "layer.1.EncDecAttention"]]
    assert t5.loss_kind == "the model's own loss"
    shared: dict[str, Any] = {"vocab_size": 30, "embedding_size": 8, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    albert = observe(AutoModel.from_config(AlbertConfig(**shared, intermediate_size=24)), {"input_ids": ids})
    place = "encoder.albert_layer_groups.0"
    assert [layer.name for layer in albert.stacks[0].layers] == [place, f"{place} (call 2)", f"{place} (call 3)"]
    assert len({layer.tokens.correlation for layer in albert.stacks[0].layers}) == 3
    stages: dict[str, Any] = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4}
    swin = observe(AutoModel.from_config(SwinConfig(**stages)), torch.randn(1, 3, 16, 16, generator=generator(23)))
    assert [layer.tokens.tokens for layer in swin.stacks[0].layers] == [64, 16, 16]
    single = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    assert [layer.name for layer in observe(single, (X, X, X)).stacks[0].layers] == ["the model"]


def test_half_precision_and_checkpoints():
    class Checkpointed(ListOfLists):
        reentrant = False

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(checkpoint(super().forward, x, use_reentrant=self.reentrant))

    torch.manual_seed(2)
    model = Checkpointed()
    plain, checkpointed = ListOfLists(), observe(model, X).stacks[0]
    plain.load_state_dict(model.state_dict())
    assert checkpointed == observe(plain, X).stacks[0]
    model.reentrant = True
    with refused("checkpoint", "use_reentrant=False"):
        observe(model, X.clone().requires_grad_())
    half = observe(plain.bfloat16(), X.bfloat16()).stacks[0].layers[-1]
    assert half.tokens.correlation == pytest.approx(checkpointed.layers[-1].tokens.correlation, abs=0.02)
    assert half.gradients == pytest.approx(checkpointed.layers[-1].gradients, rel=0.01)  # seeds differ by 0.002 at most


def test_what_is_compiled_is_seen_and_stays_compiled():
    """A model, its parts, or a function that it calls."""
    calls: list[int] = []

    def count(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph(*args)

        return run

    class Calling(nn.Module):
        def __init__(self, function: Any):
            super().__init__()
            self.query, self.function = nn.Linear(WIDTH, WIDTH), function

        def forward(self, x: Tensor) -> Tensor:
            return self.function(x, self.query(x))

    def attend(x: Tensor, q: Tensor) -> Tensor:
        return x + torch.relu(F.scaled_dot_product_attention(q, x, x))

    def make(function: Any) -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(Calling(function), Calling(function))

    plain = observe(make(attend), X)
    function = torch.compile(attend, backend=count)
    parts = make(attend)
    parts[1].compile(backend=count)
    compiled: dict[str, Any] = {"model": torch.compile(make(attend), backend=count), "parts": parts, "function": make(function)}
    for name, model in compiled.items():
        assert observe(model, X) == plain, name
    assert not calls
    with torch.no_grad():
        function(X, X)
    assert calls


def test_shaped_models_and_a_frozen_part():
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ShapedForMaskedLM(ShapedConfig(**sizes, max_position_embeddings=12))
    ids = torch.randint(3, 30, (2, 6), generator=generator(24))
    model.model.layers[0].requires_grad_(False)
    (stack,) = observe(model, {"input_ids": ids, "labels": ids}).stacks
    assert [len(layer.gradients) for layer in stack.layers] == [0, 6]
    assert [len(call.entropy) for layer in stack.layers for call in layer.attention.values()] == [2, 2]
    assert len(observe(ShapedEncoder(3, WIDTH, 2, gamma=0.3), X).stacks[0].layers) == 3


def test_losses():
    torch.manual_seed(4)
    model = Attributes()
    own = observe(model, X, loss=lambda output, batch: (output - batch).square().mean())
    assert own.loss_kind == "the loss that was given"
    assert own.loss != observe(model, X).loss
    doubled = observe(model, X, loss=lambda output, batch: 2.0 * (output - batch).square().mean())
    one, other = (seen.stacks[0].layers[0].gradients["query.weight"] for seen in (own, doubled))
    assert other == pytest.approx(2.0 * one)
    with refused("loss", "one number", "[2, 5, 16]"):
        observe(model, X, loss=lambda output, batch: output)


def test_dead_units_are_those_without_a_derivative():
    x = torch.tensor([[-1.0, 2.0, -30.0, 8.0, -0.1], [-3.0, -1.0, -30.0, 9.0, -0.2]])
    assert count_dead_units(torch.relu, x).dead == 3
    for function in (torch.nn.functional.gelu, torch.nn.functional.silu):
        assert count_dead_units(function, x).dead == 1
    assert count_dead_units(torch.tanh, x).dead == 1 + 1  # 9 is saturated too


def test_tokens_that_coincide_or_are_too_few():
    same = measure_tokens(torch.ones(1, 3, 4))
    assert (same.correlation, same.rank, same.length, same.kurtosis) == pytest.approx((1.0, 1.0, 1.0, 1.0))
    assert str(measure_tokens(torch.ones(1, 1, 4)).correlation) == "nan"
    one = torch.zeros(1, 2, 4)
    one[..., 2] = 3.0
    assert measure_tokens(one).kurtosis == pytest.approx(4.0)


def test_refusals():
    with refused("model", "torch.nn.Module", "int"):
        observe(3, X)  # pyright: ignore[reportArgumentType]
    with refused("model", "attention", "Linear"):
        observe(nn.Linear(WIDTH, WIDTH), X, loss=lambda *_: pytest.fail("before anything is differentiated"))
    with refused("batch", "ListOfLists", "[2, 5, 3]"):
        observe(ListOfLists(), X[..., :3])
