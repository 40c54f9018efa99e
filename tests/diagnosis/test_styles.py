"""The stream of models in many styles (`styles.py`), compared with the one that they keep; where it is not found, that is told."""

import pytest
import torch
from by_hand import check_tokens
from plain_models import WIDTH, Fused
from styles import MODELS, SHAPES, Handed, InSlices, LongSkip, Looped, Pooled, Streams
from torch import Tensor, nn

import shaped
from refusals import refused
from shaped.diagnosis import observe
from shaped.diagnosis.page import render_page
from shaped.testing.stats import generator


@pytest.mark.parametrize("style", MODELS)
def test_the_stream_is_found_in_every_style(style: str):
    torch.manual_seed(83)
    model = MODELS[style]()
    x = torch.randn(SHAPES.get(style, (2, 5, WIDTH)), generator=generator(84))
    stack = observe(model, x).stacks[-1]
    assert not stack.unseen
    streams = [one.transpose(0, 1) if style == "tokens before sequences" else one.flatten(1, -2) for one in model.streams]
    for found, stream in zip((stack.entering, *(layer.tokens for layer in stack.layers)), streams, strict=True):
        check_tokens(found, stream)
    with shaped.watch(model, every=1) as watcher:
        loss = model(x).square().mean()
        loss.backward()
        watcher.step(loss)
    for layer in stack.layers:
        assert watcher.rows[0].quantities["correlation"][layer.name] == pytest.approx(layer.tokens.correlation, abs=1e-5)


def test_where_the_stream_is_not_known_it_is_told():
    torch.manual_seed(85)
    model, x = Handed(), torch.randn(2, 5, WIDTH, generator=generator(86))
    found = shaped.diagnose(model, x, seeds=0)
    (stack,) = found.observation.stacks
    for one, stream in zip((stack.entering, *(layer.tokens for layer in stack.layers[:-1])), model.streams, strict=False):
        check_tokens(one, stream)
    assert stack.unseen == "the residual stream was not seen behind layers.2"
    assert stack.unseen in repr(found)
    assert (found.layers[-1]["correlation"], stack.layers[-1].tokens.tokens) == (pytest.approx(float("nan"), nan_ok=True), 0)
    assert f"<p>{stack.unseen}.</p>" in render_page(found.to_json())


def test_the_last_stream_is_not_guessed_where_layers_differ():
    """The second sum has another place in the code of its module, where the first layer and the last one have one number a feature."""
    torch.manual_seed(90)

    def step(model: Looped, layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
        y = layer(x)
        return x + y if layer is model.layers[1] else x + y * y.mean((0, 1)).tanh()

    model = Looped(Fused, step)
    (stack,) = observe(model, torch.randn(2, 5, WIDTH, generator=generator(91))).stacks
    assert stack.unseen == "the residual stream was not seen behind layers.2"
    for one, stream in zip((stack.entering, *(layer.tokens for layer in stack.layers[:-1])), model.streams, strict=False):
        check_tokens(one, stream)


def test_a_stream_that_is_gone_is_told():
    """Only its multiple is left when the sum is computed: that has another length."""
    torch.manual_seed(94)

    class Doubled(Looped):
        def run(self, x: Tensor) -> Tensor:
            x = x + 1.0
            for layer in self.layers:
                y = layer(x.tanh())
                x = 2.0 * x
                x = x + y
            return x

    (stack,) = observe(Doubled(Fused), torch.randn(2, 5, WIDTH, generator=generator(95))).stacks
    assert stack.unseen == "the residual stream was not seen before layers.0, behind layers.0"


def test_without_residual_sums_the_numbers_are_of_what_layers_take_and_return():
    torch.manual_seed(87)
    x = torch.randn(2, 5, WIDTH, generator=generator(88))
    streams = x[:, :, None] + torch.arange(3.0)[:, None]
    for model, given in ((Looped(Fused), x), (LongSkip(Fused), x), (Looped(Streams), streams)):
        (stack,) = observe(model, given).stacks
        assert stack.unseen == "no residual sum was seen in layers: its numbers are of what the layers take and return"
        for one, stream in zip((stack.entering, *(layer.tokens for layer in stack.layers)), model.streams, strict=True):
            check_tokens(one, stream.flatten(1, -2))


def test_a_softmax_of_slices_is_refused():
    """They may be of heads or of sequences."""
    with refused("model must have attention", "in which none was seen"):
        observe(Looped(InSlices), torch.randn(2, 5, WIDTH, generator=generator(89)))


def test_attention_behind_the_layers_is_not_of_the_last_one():
    torch.manual_seed(92)
    found = [len(layer.attention) for layer in observe(Pooled(), torch.randn(2, 5, WIDTH, generator=generator(93))).stacks[0].layers]
    assert found == [1, 1, 1]
