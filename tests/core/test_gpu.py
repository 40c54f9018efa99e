"""The same laws on a GPU. CI has none; these run where there is one."""

import math

import pytest
import torch

import shaped
from shaped.engine import cuda_graph
from shaped.testing.stats import KS_AT_Z, seed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BLOCK = shaped.ShapedAttention(0.5) >> shaped.ShapedFeedForward(0.5)
LAYERS = {
    "transformer": BLOCK,
    "causal heads": shaped.ShapedAttention(0.5, heads=4, project=True, mask="causal") >> shaped.ShapedPerceptron(),
    "Pre-LN": shaped.PreLN(shaped.ShapedAttention(1.0, lam=1.0, identity=False)) >> shaped.PreLN(shaped.ReLUFeedForward(1.0, lam=1.0)),
}


def assert_one_law(one, other):
    found = shaped.compare(one, other)
    for distance in found.ks.values():
        assert distance.value < KS_AT_Z * math.sqrt(1 / found.samples[0] + 1 / found.samples[1])


@pytest.mark.parametrize("m", [4, 9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_solve(m, dtype):
    V0 = shaped.equicorrelated(m, 0.2)
    here, there = (
        shaped.solve(BLOCK, V0, T=0.5, steps=50, samples=20_000, seed=seed(90), device=device, dtype=dtype, record="last", upper=1e4)
        for device in ("cpu", "cuda")
    )
    assert there.V.is_cuda
    assert_one_law(here, there)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("m", [4, 9])
def test_propagate(name, m):
    V0 = shaped.equicorrelated(m, 0.2)
    here, there = (
        shaped.propagate(LAYERS[name], V0, n=32, d=12, samples=10_000, seed=seed(91), device=device, record="last", upper=1e4)
        for device in ("cpu", "cuda")
    )
    assert_one_law(here, there)


def test_same_seed_same_bits_on_the_gpu():
    V0 = shaped.equicorrelated(4, 0.2)
    one, two = (shaped.solve(BLOCK, V0, T=0.1, steps=5, samples=1000, seed=1, device="cuda") for _ in range(2))
    assert torch.equal(one.V, two.V)


@pytest.mark.parametrize("name", LAYERS)
def test_a_cuda_graph_changes_no_bit(name, monkeypatch):
    """Some paths stop on the way, and the states at every step are compared."""

    def run() -> shaped.Trajectory:
        V0 = shaped.equicorrelated(4, 0.2)
        return shaped.propagate(LAYERS[name], V0, n=32, d=40, samples=2000, seed=seed(92), device="cuda", upper=6.0)

    captured = run()
    monkeypatch.setattr(cuda_graph, "FEWEST", math.inf)
    launched = run()
    assert captured.stopped.isfinite().any()
    assert torch.equal(captured.V, launched.V)
    assert torch.equal(captured.stopped, launched.stopped)
