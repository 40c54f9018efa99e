"""The fused blocks without a GPU."""

from pathlib import Path
from typing import Any

import pytest

from shaped.train.step.config import StepConfig
from shaped.train.step.fused_block import can_fuse
from shaped.train.step.objectives.masked_lm import MaskedLoss
from shaped.train.step.stepper import Stepper
from train.step.steppers import CPU, model
from triton_interpreter import in_the_interpreter, needs_triton


@needs_triton
def test_fused_blocks_in_the_interpreter():
    in_the_interpreter(Path(__file__).with_name("interpreted.py"))


@pytest.mark.parametrize("gain", [False, True])
def test_the_kernels_have_qk_norm_without_its_gains(gain: bool):
    twin: Any = Stepper(model(qk_norm=True, qk_gain=gain), MaskedLoss, StepConfig(CPU)).twin
    assert can_fuse([layer.block for layer in twin.model.layers]) == (not gain)
