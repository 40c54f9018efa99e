"""What `solve` and `propagate` make of their arguments: steps, times, checks and refusals. Small runs, exact numbers."""

from typing import Any

import pytest
import torch

import shaped
from refusals import refused
from shaped.limit import default_steps

LINEAR = shaped.ShapedPerceptron(0.0, 0.0)  # noise of scale 1, no drift
V0 = shaped.equicorrelated(4, 0.2)


def run_everything(V: torch.Tensor) -> list[torch.Tensor]:
    attention = shaped.ShapedAttention(0.5, heads=2, project=True, mask="causal", rope=10.0)
    weights = shaped.Weights(0.3, 0.1)
    branch = shaped.AttentionBranch(
        2, 4, weights, weights, weights, weights, mask=shaped.alibi(4, 2), qk_norm=shaped.Norm("layer"), rope=10.0
    )
    blocks = attention >> shaped.ShapedFeedForward(0.5), shaped.ResidualBlock(branch, norm=shaped.Norm("rms"))
    found = [attention.entropy(V[None], n=8, seed=0)]
    limit = shaped.solve(blocks[0], V, T=0.5, steps=2, samples=64, seed=0, dtype=torch.float32, check=True)
    for block in blocks:
        network = shaped.propagate(block, V, n=8, d=4, samples=4, seed=0, dtype=torch.float32)
        gradients = shaped.backpropagate(
            block, V, n=8, d=4, outputs=1, loss=lambda x: x.square().sum((-2, -1)), samples=4, seed=0, dtype=torch.float32
        )
        found += [network.V, network.t, network.stopped, gradients.tokens, gradients.t, *gradients.weights.values()]
        assert shaped.compare(limit, network, resamples=20).ks
    return [*found, limit.V, limit.stopped]


@pytest.mark.parametrize(
    "surroundings",
    [torch.no_grad, torch.inference_mode, lambda: torch.device("meta"), lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "default device", "autocast"],
)
def test_what_the_caller_has_switched_on_changes_no_number(surroundings: Any):
    """Autocast had rounded float32 to bfloat16, backpropagate had blamed the layer where gradients are off, and a default device failed."""
    expected = run_everything(V0)
    with surroundings():
        found = run_everything(V0.clone())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert {x.device.type for x in found} == {"cpu"}


@pytest.mark.parametrize(("m", "steps"), [(4, 5), (99, 10), (199, 20)])
def test_more_tokens_take_more_steps(m, steps):
    """The weights' noise wants nu >= 2(m + 1), a step of at most 1/(2(m + 1)); others are happy with 0.01."""
    paths = shaped.solve(LINEAR, shaped.equicorrelated(m, 0.2), T=0.05, samples=1, seed=0)
    assert paths.info == {"method": "cone", "steps": steps, "seed": 0}
    assert len(paths.t) == steps + 1
    assert paths.t[-1].item() == pytest.approx(0.05)


def test_a_start_for_each_path_has_as_many_tokens():
    """99 tokens, two paths: steps as for 99 tokens."""
    assert shaped.solve(LINEAR, shaped.equicorrelated(99, 0.2).expand(2, 99, 99), T=0.05, seed=0).info["steps"] == 10


def test_a_step_is_taken_in_at_most_a_thousand_parts():
    """A part is at most 0.05 long with 4 tokens: one step to t = 50, two to any time after it."""
    assert shaped.solve(LINEAR, V0, T=50.0, steps=1, samples=2, seed=0).info["steps"] == 1
    with refused("steps", "at least 2", "T = 50.1", "got 1"):
        shaped.solve(LINEAR, V0, T=50.1, steps=1, samples=2, seed=0)
    assert shaped.solve(LINEAR, V0, T=50.1, steps=2, samples=2, seed=0).info["steps"] == 2
    without_noise = shaped.ShapedAttention(0.0)
    assert shaped.solve(without_noise, V0, T=1e6, steps=1, samples=2, seed=0).V[-1, 0].tolist() == V0.tolist()


def test_the_most_steps():
    assert default_steps(LINEAR, 4, 1e7) == 10**9
    with refused("T must", "1e+07", "1000000000 steps", "1.1e+07"):
        default_steps(LINEAR, 4, 1.1e7)
    with refused("steps", "1000000000", "1000000001"):
        shaped.solve(LINEAR, V0, T=1.0, steps=10**9 + 1, seed=0)


def test_methods():
    euler = shaped.solve(LINEAR, V0, T=0.05, samples=3, seed=0, method="euler").info
    assert euler.keys() == {"method", "steps", "seed", "projections"}
    assert euler["method"] == "euler"
    for method in (3, ["cone"], "heun"):
        with refused("method", "'cone', 'euler'", repr(method)):
            shaped.solve(LINEAR, V0, T=0.05, seed=0, method=method)  # pyright: ignore[reportArgumentType] (wrong on purpose)


@pytest.mark.parametrize(("samples", "pairs"), [(10, 10), (16, 16), (100, 16), (544, 17)])
def test_how_many_paths_the_check_takes(samples, pairs):
    """One in 32, but at least 16 if there are as many."""
    info = shaped.solve(LINEAR, V0, T=0.02, steps=2, samples=samples, seed=0, check=True, record="last").info
    assert info["step_effect"].pairs == pairs


def test_the_check_compares_a_step_with_two_of_half_its_length():
    """So short a time has next to no noise: the effect on rho is the difference of two runs, of one step and of two."""
    layer = shaped.ShapedPerceptron(200.0, -200.0)
    starts = torch.stack([shaped.equicorrelated(2, rho) for rho in torch.linspace(0.0, 0.9, 64).tolist()])
    how = {"T": 1e-5, "seed": 0, "record": "last"}
    effect = shaped.solve(layer, starts, steps=1, check=True, **how).info["step_effect"]
    one, two = (shaped.solve(layer, starts[::4], steps=steps, **how).rho[-1, :, 0, 1].mean().item() for steps in (1, 2))
    change, error = effect.rho_mean
    assert effect.pairs == 16
    assert change == pytest.approx(two - one, abs=5 * error)
    assert abs(change) > 5 * error, "the effect would not be seen"


def test_widths_and_paths_of_networks():
    layer = shaped.ShapedAttention(0.5, heads=2)
    for run in (lambda: shaped.propagate([layer], V0, n=4, d=1, seed=0), lambda: shaped.solve([layer], V0, T=0.1, seed=0)):  # pyright: ignore
        with refused("layer must", "ShapedAttention"):
            run()
    with refused("n must", "at least 4", "3"):
        shaped.propagate(LINEAR, V0, n=3, d=1, seed=0)
    assert shaped.propagate(LINEAR, V0, n=4, d=2, seed=0).t.tolist() == [0.0, 0.25, 0.5]
    with refused("path", "'tokens'", "single features"):
        shaped.propagate(layer, V0, n=4, d=1, seed=0, path="gram")
    for given, path in (("auto", "gram"), ("gram", "gram"), ("tokens", "tokens")):
        assert shaped.propagate(LINEAR, V0, n=4, d=1, seed=0, path=given).info == {"path": path, "n": 4, "d": 1, "seed": 0}
