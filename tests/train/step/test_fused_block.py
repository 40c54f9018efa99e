"""The fused blocks without a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shaped.kernels import attention_correction, long_attention, short_attention
from shaped.kernels.long_attention import LongAttention
from shaped.kernels.short_attention import ShortAttention
from shaped.kernels.side_stream import SideStream
from shaped.nn.modules import ShapedSelfAttention
from shaped.nn.rotary import make_rotation
from shaped.train.step.config import StepConfig
from shaped.train.step.fused_block import FusedBlock, can_fuse, choose_attention
from shaped.train.step.objectives.masked_lm import MaskedLoss
from shaped.train.step.stepper import Stepper
from train.step.steppers import CPU, model
from triton_interpreter import in_the_interpreter, needs_triton


@needs_triton
def test_fused_blocks_in_the_interpreter():
    in_the_interpreter(Path(__file__).with_name("interpreted.py"))


@pytest.mark.parametrize("gain", [False, True])
def test_the_kernels_have_qk_norm_and_its_gains(gain: bool):
    twin: Any = Stepper(model(qk_norm=True, qk_gain=gain), MaskedLoss, StepConfig(CPU)).twin
    assert can_fuse([layer.block for layer in twin.model.layers])


@pytest.mark.parametrize("other", [0, 1], ids=["in one block", "of two blocks"])
def test_a_gain_in_two_places_takes_the_fallback(other: int):
    """Autograd would add up both gradients before the side stream has computed them."""
    twin: Any = Stepper(model(qk_norm=True, qk_gain=True), MaskedLoss, StepConfig(CPU)).twin
    blocks = [layer.block for layer in twin.model.layers]
    blocks[other].attention.qk_gains.key = blocks[0].attention.qk_gains.query
    assert not can_fuse(blocks)


@pytest.fixture
def fitting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever depends on the GPU fits."""
    for module in (short_attention, long_attention):
        monkeypatch.setattr(module, "fits", lambda x, D: True)


@pytest.mark.usefixtures("fitting")
def test_every_attention_gets_the_kernels_that_compute_it():
    x, rotation = torch.zeros(2, 12, 32), make_rotation(torch.arange(12)[None], 16)
    plain, causal, dropping = ShapedSelfAttention(32, 2), ShapedSelfAttention(32, 2, causal=True), ShapedSelfAttention(32, 2, dropout=0.1)
    assert isinstance(choose_attention(plain, x, None), ShortAttention)
    for attention, turned in ((plain, rotation), (causal, None), (causal, rotation)):
        chosen = choose_attention(attention, x, turned)
        assert isinstance(chosen, LongAttention)
        assert (chosen.causal, chosen.rotation) == (attention.is_causal, turned)
    assert choose_attention(dropping, x, None) is None
    assert isinstance(choose_attention(dropping.eval(), x, None), ShortAttention)


@pytest.mark.usefixtures("fitting")
def test_a_mask_takes_the_fallback():
    """Documents that are kept apart, padding: the kernels would attend across them."""
    twin: Any = Stepper(model(), MaskedLoss, StepConfig(CPU)).twin
    block = FusedBlock(twin.model.layers[0].block, lambda *_: "fallback", SideStream(), last=True)
    assert block(torch.zeros(2, 12, 16), mask=torch.ones(2, 1, 12, 12, dtype=torch.bool)) == "fallback"


def test_heads_that_the_stock_kernels_do_not_take_take_the_fallback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(long_attention, "can_launch", lambda x: True)
    monkeypatch.setattr(attention_correction, "has_flash", lambda device: True)
    x = torch.zeros(2, 12, 96)
    assert [D for D in range(8, 257, 8) if long_attention.fits(x, D)] == [16, 32, 64, 128, 256]
    assert not long_attention.fits(x[:, :0], 64)
