"""The gradient of each gain of a fused block, on a GPU in bfloat16. Without a GPU, test_interpreted.py does the same in float16."""

import pytest
import torch
from gain_gradients import Shape, check_errors, find_relative_errors

from shaped.kernels import fused_block, relu_matmul, relu_matmul_hopper
from shaped.kernels.availability import TRITON
from shaped.kernels.fused_block import Gains
from shaped.testing.stats import generator

needs_gpu = pytest.mark.skipif(not (torch.cuda.is_available() and TRITON), reason="needs a GPU and Triton")
ALL = Gains(*[True] * 7)
WITHOUT_SHAPING = ALL._replace(gamma1=False, gamma2=False, slope=False)


@needs_gpu
@pytest.mark.parametrize("learned", [ALL, WITHOUT_SHAPING], ids=["all gains", "without the shaping"])
@pytest.mark.parametrize("kept", [None, 8], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize("qk_eps", [None, 1e-6], ids=["raw queries and keys", "QK-norm"])
@pytest.mark.parametrize("causal", [False, True], ids=["short", "causal"])
@pytest.mark.parametrize("module", [relu_matmul, relu_matmul_hopper], ids=["any GPU", "Hopper"])
def test_each_gain_has_its_own_gradient(module, causal, qk_eps, kept, learned, monkeypatch):
    if module is relu_matmul_hopper and not relu_matmul_hopper.fits(*(torch.zeros(8, 8, dtype=torch.bfloat16, device="cuda"),) * 2):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(fused_block, "choose_relu_matmul", lambda x, weight: module)
    g, shape = generator(130), Shape(batch=4, m=64, width=128, heads=4, kept=kept, qk_eps=qk_eps, causal=causal)
    check_errors(torch.stack([find_relative_errors(shape, "cuda", torch.bfloat16, learned, g) for _ in range(16)]), torch.bfloat16)


@pytest.mark.parametrize("gain", range(7))
def test_a_gain_that_is_off_by_5_percent_is_rejected(gain):
    errors = torch.randn(16, 7, generator=generator(131), dtype=torch.float64) * 2**-9
    check_errors(errors, torch.bfloat16)
    errors[:, gain] += 0.05
    with pytest.raises(AssertionError, match="standard errors off"):
        check_errors(errors, torch.bfloat16)
