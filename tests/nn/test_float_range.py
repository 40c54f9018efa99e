"""What is measured while a model trains, where numbers are near the ends of the float range. The rest: tests/hf/test_trainer.py."""

import math

import pytest
import torch

from shaped.nn.diagnostics import gradient_norm, token_correlation
from shaped.testing.stats import generator


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("power", [-100, -45, 100])
def test_the_correlation_does_not_depend_on_the_length_of_tokens(power, dtype):
    """Of tokens shorter than 1e-12 it had gone to 0, and in float32 of those longer than 1e19 too."""
    x = torch.randn(2, 5, 8, generator=generator(1), dtype=dtype) + 1.0
    assert torch.equal(token_correlation(x * 2.0**power), token_correlation(x))
    assert token_correlation(torch.cat([x, 0 * x[:, :1]], 1)).isfinite().all()


@pytest.mark.parametrize("power", [-100, 0, 100])
def test_the_norm_of_gradients_that_vanish_or_explode(power):
    """The squares of float32 end at 1e-45: a norm of 1e-23 had been 0."""
    gradients = [torch.randn(3, 4, generator=generator(2)), torch.zeros(2), torch.empty(0), torch.randn(5, generator=generator(3))]
    expected = torch.cat([gradient.double().flatten() for gradient in gradients]).norm().item()
    scaled = [gradient * 2.0**power for gradient in gradients]
    assert gradient_norm(scaled) == pytest.approx(expected * 2.0**power, rel=1e-6, abs=0.0)


def test_gradients_that_are_no_numbers_are_seen():
    assert gradient_norm([torch.ones(2), torch.tensor([1.0, math.nan])]) == pytest.approx(math.nan, nan_ok=True)
    assert gradient_norm([torch.ones(2), torch.tensor([1.0, -math.inf])]) == math.inf
    assert gradient_norm([]) == 0.0
