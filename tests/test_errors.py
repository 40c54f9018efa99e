"""Wrong input: a ValueError that names the argument and what it got."""

import math
from typing import Any

import pytest
import torch

import shaped
from shaped.workers import LocalWorkers

EYE = torch.eye(3, dtype=torch.float64)
LAYER: shaped.Layer = shaped.ShapedPerceptron()


def solve(V0: torch.Tensor = EYE, layer: shaped.Layer = LAYER, **changes):
    return shaped.solve(layer, V0, **({"T": 0.1, "steps": 2, "samples": 2, "seed": 0} | changes))


def propagate(V0: torch.Tensor = EYE, layer: shaped.Layer = LAYER, **changes):
    usual: dict[str, Any] = {"n": 8, "d": 2, "samples": 2, "seed": 0}
    return shaped.propagate(layer, V0, **(usual | changes))


NORMALISED = shaped.PreLN(shaped.ShapedAttention(0.5))
PATHS = propagate(samples=4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: propagate(n=2), ["n must", "3", "2"]),
        (lambda: propagate(n=0), ["n must", "0"]),
        (lambda: propagate(d=0), ["d must", "0"]),
        (lambda: propagate(n_k=0), ["n_k", "0"]),
        (lambda: propagate(samples=0), ["samples", "0"]),
        (lambda: propagate(torch.ones(2, 3)), ["V0", "square", "(2, 3)"]),
        (lambda: propagate(torch.tensor(1.0)), ["V0", "square", "()"]),
        (lambda: propagate(layer=shaped.ShapedAttention(0.5, heads=3)), ["heads", "8", "3"]),
        (lambda: shaped.ShapedAttention(0.5, heads=3).module(8), ["heads", "8", "3"]),
        (lambda: propagate(path="weights"), ["path", "gram", "weights"]),
        (lambda: propagate(layer=NORMALISED, path="gram"), ["path", "tokens", "PreLN"]),
        (lambda: shaped.PreLN(LAYER), ["layer", "ShapedPerceptron"]),  # pyright: ignore[reportArgumentType] (wrong on purpose)
        (lambda: shaped.ShapedAttention(0.5, lam=1.5), ["lam", "1.5"]),
        (lambda: shaped.ReLUFeedForward(0.5, math.nan), ["negative_slope", "nan"]),
        (lambda: shaped.compare(PATHS, propagate(torch.eye(2, dtype=torch.float64))), ["other", "3", "2"]),
        (lambda: shaped.compare(PATHS, PATHS, statistics=["trace"]), ["statistics", "trace"]),
        (lambda: shaped.compare(PATHS, PATHS, pair=(0, 3)), ["pair", "3"]),
        (lambda: shaped.compare(PATHS, PATHS, resamples=1), ["resamples", "1"]),
        (lambda: LocalWorkers(0), ["workers", "0"]),
        (lambda: solve(torch.ones(2, 3)), ["V0", "square", "(2, 3)"]),
        (lambda: solve(torch.ones(2, 2, 3, 3)), ["V0", "(2, 2, 3, 3)"]),
        (lambda: solve(torch.tensor([[1.0, 0.5], [0.1, 1.0]])), ["V0", "symmetric", "0.4"]),
        (lambda: solve(torch.tensor([[1.0, 2.0], [2.0, 1.0]])), ["V0", "positive semi-definite", "-1"]),
        (lambda: solve(torch.tensor([[1.0, math.nan], [math.nan, 1.0]])), ["V0", "finite", "nan"]),
        (lambda: solve(EYE.expand(5, 3, 3)), ["samples", "5", "2"]),
        (lambda: shaped.equicorrelated(4, -0.5), ["rho", "-0.3333", "-0.5"]),
        (lambda: shaped.equicorrelated(4, 1.1), ["rho", "1.1"]),
        (lambda: shaped.equicorrelated(0, 0.1), ["m", "0"]),
        (lambda: shaped.equicorrelated(2, 0.1, variance=-1.0), ["variance", "-1"]),
        (lambda: shaped.ShapedAttention(1.5), ["gamma", "1.5"]),
        (lambda: shaped.ShapedFeedForward(-0.1), ["gamma", "-0.1"]),
        (lambda: shaped.ShapedFeedForward(0.5, c_plus=math.nan), ["c_plus", "nan"]),
        (lambda: shaped.ShapedPerceptron(c_minus=math.inf), ["c_minus", "inf"]),
        (lambda: shaped.ShapedAttention(0.5, 0.0), ["tau0", "0.0"]),
        (lambda: shaped.ShapedAttention(0.5, heads=0), ["heads", "0"]),
        (lambda: shaped.ShapedAttention(0.5, mask="diagonal"), ["mask", "diagonal"]),
        (lambda: shaped.ShapedAttention(0.5, mask=torch.ones(2, 3)), ["mask", "(2, 3)"]),
        (lambda: shaped.ShapedAttention(0.5, mask=torch.tensor([[0.0, -math.inf], [-math.inf, -math.inf]])), ["mask", "row 1"]),
        (lambda: shaped.ShapedAttention(0.5, mask=torch.eye(2).bool() & torch.tensor([True, False])), ["mask", "row 1"]),
        (lambda: shaped.ShapedAttention(0.5, mask=torch.tensor([[math.inf]])), ["mask", "inf"]),
        (lambda: solve(layer=shaped.ShapedAttention(0.5, mask=torch.zeros(2, 2))), ["mask", "3 x 3", "2 x 2"]),
        (lambda: solve(steps=0), ["steps", "0"]),
        (lambda: solve(samples=0), ["samples", "0"]),
        (lambda: solve(T=-1.0), ["T", "-1.0"]),
        (lambda: solve(T=math.nan), ["T", "nan"]),
        (lambda: solve(seed=-1), ["seed", "-1"]),
        (lambda: solve(chunk=0), ["chunk", "0"]),
        (lambda: solve(record="some"), ["record", "some"]),
        (lambda: solve(record=0), ["record", "0"]),
        (lambda: solve(method="heun"), ["method", "cone", "heun"]),
        (lambda: solve(device="abacus"), ["device", "abacus"]),
        (lambda: solve(dtype=torch.float16), ["dtype", "float16"]),
        (lambda: solve(upper=-1.0), ["upper", "-1.0"]),
        (lambda: solve(lower=math.inf), ["lower", "inf"]),
        (lambda: solve(samples=10**9, record=1, V0=torch.eye(300, dtype=torch.float64)), ["samples", "record", "GiB"]),
        (lambda: LAYER.drift(torch.ones(2, 3, 3, 2)), ["V", "(2, 3, 3, 2)"]),
        (lambda: shaped.Chain(), ["layers"]),
    ],
)
def test_wrong_input_is_named(call, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the words are checked below)
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_barely_indefinite_start_is_rounding_and_accepted():
    X = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))  # single precision, rank 2
    paths = solve(X @ X.mT)
    assert torch.linalg.eigvalsh(paths.V[0]).min() > -1e-12
