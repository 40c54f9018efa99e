"""The shaped GELU: its contract, its drift by quadrature, its solver step in closed form, its trainable module."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import shaped
from shaped.hf import ShapedConfig, ShapedForMaskedLM
from shaped.nn import Learn, Recover, ShapedEncoder, ShapedFeedForwardBlock, vanilla
from shaped.testing import assert_rejected, check_contract, check_module, random_covariance

GELU = shaped.ShapedGELU(a=0.7)


def test_the_feed_forward_layer_keeps_the_contract():
    check_contract(shaped.ShapedFeedForward(0.8, activation=GELU))


def test_the_perceptron_has_the_law_of_explicit_weights():
    check_module(shaped.ShapedPerceptron(activation=GELU))


def mean_step(V: np.ndarray, n: int) -> np.ndarray:
    """E[V'] of the perceptron by Gauss-Hermite quadrature, for two tokens."""
    x, w = np.polynomial.hermite_e.hermegauss(100)
    w, root, activation = w / w.sum(), np.linalg.cholesky(V), GELU.at(n)
    first, second = root[0, 0] * x[:, None] + 0 * x, root[1, 0] * x[:, None] + root[1, 1] * x
    features = [activation(torch.from_numpy(g)).numpy() for g in (first, second)]
    constant = 1 / (w @ activation(torch.from_numpy(x)).numpy() ** 2)
    assert activation.normaliser() == pytest.approx(constant, rel=1e-13)
    return constant * np.array([[w @ (f * g) @ w for f in features] for g in features])


def test_the_drift_is_the_first_order_in_1_over_n():
    """n (E[V'] - V) - b halves when n doubles, and what is left after extrapolation is far below 5 % of b."""
    V = np.array([[1.7, 0.5], [0.5, 0.6]])
    b = shaped.ShapedPerceptron(activation=GELU).drift(torch.from_numpy(V)).numpy()
    errors = [n * (mean_step(V, n) - V) - b for n in (1024, 2048)]
    assert errors[0] / errors[1] == pytest.approx(2.0, rel=0.02)

    def check(b):
        found = [n * (mean_step(V, n) - V) for n in (1024, 2048)]
        assert np.abs(2 * found[1] - found[0] - b).max() < 1e-3 * np.abs(b).max()

    check(b)
    for wrong in (0.95, 1.05):
        assert_rejected(lambda wrong=wrong: check(wrong * b))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_variance_follows_the_logistic_equation(dtype):
    """dv/dt = k v (v - 1) has the solution e^{-kt} v/(1 - v (1 - e^{-kt})), also where a path takes the step in parts; then it explodes."""
    h, v = 0.01, torch.tensor([0.1, 1.0, 5.0, 20.0, 100.0, 1e6], dtype=dtype)
    flow = GELU.flow(1.0)
    k = 3 * (math.sqrt(2 / math.pi) / 0.7) ** 2
    tau = -math.expm1(-k * h)
    exact = torch.where(tau * v < 0.9, (1 - tau) * v / (1 - tau * v), math.inf)
    assert exact.isfinite().sum() == 4
    assert torch.allclose(flow.move(v[:, None, None], h)[:, 0, 0], exact, rtol=1e-3)
    start = 3 * random_covariance(3, 12, (50,)).to(dtype)
    moved = flow.move(start, 0.05)
    running = moved.isfinite().all(-1).all(-1)
    assert 5 < running.sum() < 50
    assert torch.equal(moved, moved.mT)
    assert (torch.linalg.eigvalsh(moved[running])[:, 0] > -1e-5 * moved[running].amax((-2, -1))).all()


def test_explosion_is_an_outcome():
    layer = shaped.ShapedPerceptron(activation=GELU) >> shaped.ShapedAttention(0.5)
    paths = shaped.solve(layer, shaped.equicorrelated(3, 0.2), T=1.0, steps=100, samples=200, seed=0)
    assert paths.V.isfinite().all()
    assert 0.2 < paths.stopped_share < 0.95
    assert shaped.solve(shaped.ShapedPerceptron(activation=shaped.ShapedGELU(0.3)), [[1.0]], T=0.1, seed=0).info["steps"] == 22
    assert len((layer >> layer).terms) == 3


def test_the_plain_gelu_keeps_the_variance():
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    square = (weights * torch.nn.functional.gelu(torch.tensor(nodes)).numpy() ** 2).sum() / weights.sum()
    assert GELU.plain.normaliser() == pytest.approx(1 / square, rel=1e-9)


def test_modules_go_from_the_shaped_to_the_plain_gelu():
    x = torch.linspace(-4, 4, 41)
    slope = torch.tensor([1.0])
    assert torch.allclose(GELU.apply(x, slope, 64), GELU.at(64)(x), atol=1e-6)
    assert torch.allclose(GELU.apply(x, 0 * slope, 64), torch.nn.functional.gelu(x), atol=1e-6)
    encoder = ShapedEncoder(2, 16, 2, gamma=0.5, schedule=Recover(4), activation=GELU)
    encoder.schedule.apply(encoder, 4)
    tokens = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(vanilla(encoder)(tokens), encoder(tokens), atol=1e-5)
    block = ShapedFeedForwardBlock(16, schedule=Learn(), activation=GELU)
    block(tokens).square().mean().backward()
    assert block.slope is not None
    assert block.slope.grad is not None
    assert block.slope.grad.abs() > 1e-3
    wide = ShapedFeedForwardBlock(256, 2048, activation=GELU)
    out = wide(torch.randn(64, 256, generator=torch.Generator().manual_seed(1)))
    assert out.square().mean().item() == pytest.approx(1.0, abs=0.1)


def test_half_precision_keeps_the_bend():
    """A model in bfloat16 has its slope in bfloat16: the bend, 1/s = 0.045, must not be rounded like a number near 1."""
    x, slope = torch.linspace(-4, 4, 41), torch.tensor([1.0], dtype=torch.bfloat16)
    bend = GELU.at(1000)(x) - x
    assert torch.allclose(GELU.apply(x, slope, 1000) - x, bend, atol=0.01 * bend.max().item())


def test_a_config_chooses_it(tmp_path):
    sizes: dict[str, Any] = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for block in ("shaped", "preln"):
        model = ShapedForMaskedLM(ShapedConfig(**sizes, activation="gelu", block=block))
        assert [part.activation for part in model.modules() if isinstance(part, ShapedFeedForwardBlock)] == [shaped.ShapedGELU(1.0)]
        model.save_pretrained(tmp_path / block)
        again = ShapedForMaskedLM.from_pretrained(tmp_path / block)
        ids = torch.arange(6)[None]
        assert torch.equal(model(ids).logits, again(ids).logits)
    with pytest.raises(ValueError, match=r"activation must be one of relu, gelu, got 'tanh'"):
        ShapedConfig(**sizes, activation="tanh")


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"activation must be a shaped activation.*'gelu'"):
        ShapedFeedForwardBlock(16, activation="gelu")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"c_plus and c_minus must be left out.*1 and -1"):
        shaped.ShapedPerceptron(1.0, activation=GELU)
    with pytest.raises(ValueError, match=r"^a must be positive.*got 0.0"):
        shaped.ShapedGELU(0.0)
    assert repr(shaped.ShapedPerceptron(activation=GELU)) == "ShapedPerceptron(activation=ShapedGELU(a=0.7))"
    assert repr(shaped.ShapedPerceptron()) == "ShapedPerceptron(c_plus=0.0, c_minus=-1.0)"
