"""shaped.testing rejects layers whose faces differ; solve and propagate share their options."""

import ast
import inspect
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shaped
from shaped import testing
from shaped.covariance import Point
from shaped.engine import RunOptions
from shaped.layers import ResidualLayer
from shaped.layers.base import Sizes
from shaped.layers.feedforward import ActivationDrift
from shaped.layers.terms import WeightNoise
from shaped.testing import drift, law, limit


@dataclass(frozen=True, repr=False)
class WrongDrift(shaped.ShapedFeedForward):
    def limit(self):
        return WeightNoise(2 * 0.64), ActivationDrift(self.shape.flow(0.64 * 1.05))


@dataclass(frozen=True, repr=False)
class WrongNoise(shaped.ShapedFeedForward):
    def limit(self):
        return WeightNoise(1.05 * 2 * 0.64), ActivationDrift(self.shape.flow(0.64))


@dataclass(frozen=True, repr=False)
class WrongModule(shaped.ShapedFeedForward):
    def module(self, n, n_k=None, *, generator=None, dtype=None):
        return shaped.ShapedFeedForward(0.7, self.c_plus, self.c_minus).module(n, n_k, generator=generator, dtype=dtype)


class Crooked(shaped.ShapedFeedForward):
    def drift(self, V):
        return super().drift(V).tril()


def test_a_wrong_layer_is_rejected():
    for check, layer in (
        (testing.check_drift_of_branch, WrongDrift(0.8, 0.0, -2.0)),
        (lambda layer: testing.check_Sigma_of_steps(layer), WrongNoise(0.8, 0.5, -0.5)),
        (lambda layer: testing.check_module(layer, networks=2000, samples=20_000), WrongModule(0.8, 4.0, -4.0)),
        (testing.check_symmetry, Crooked(0.8, 4.0, -4.0)),
    ):
        with pytest.raises(AssertionError, match=r"standard errors|must"):  # not for want of power
            check(layer)


@dataclass(frozen=True)
class Skewed(shaped.ShapedFeedForward):
    """Not a number where the first two tokens coincide."""

    def advance_gram(self, point, sizes, stream):
        V = super().advance_gram(point, sizes, stream).V
        return Point(matrix=torch.where((point.V[:, 0, 1] > 0.999 * point.V[:, 0, 0])[:, None, None], torch.nan, V))


FEW: dict[str, dict[str, Any]] = {
    "check_noise": {"samples": 100},
    "check_module": {"networks": 10, "samples": 100},
    "check_Sigma_of_steps": {"samples": 100},
    "check_drift_of_branch": {"samples": 100, "reject": False},
    "check_drift_of_steps": {"samples": 100, "reject": False},
    "check_chain": {"other": shaped.ShapedAttention(0.5)},
}


@pytest.mark.parametrize("name", sorted(name for name in vars(testing) if name.startswith("check_") and name != "check_contract"))
def test_checks_run_whatever_the_default_device_is(name):
    """All of them had failed after torch.set_default_device("cuda"). With so few samples some reject what is right."""
    with torch.device("meta"), suppress(AssertionError):
        getattr(testing, name)(shaped.ShapedAttention(0.8, 0.4), **FEW.get(name, {}))


def test_a_law_that_is_not_a_number_is_rejected():
    """The engine stops such a path and shows its last V, which is finite."""
    with pytest.raises(AssertionError, match="must stay finite, got nan or inf at n = 4"):
        testing.check_survival(Skewed(0.8))


@dataclass(frozen=True)
class Linear(ResidualLayer):
    """The layer of docs/adding-a-layer.md. Its drift is 0."""

    gamma: float
    lam: float | None = None
    excess: float = 0.0

    def limit(self):
        return (WeightNoise(self.gamma**2 * (2.0 - self.gamma**2)),)

    def branch(self, L, sizes, stream):
        return (L * (1 + self.excess / sizes.n) ** 0.5,)

    def module(self, n, n_k=None, **draw):
        raise AssertionError("the check of the drift needs no module")


def test_a_layer_may_have_no_drift():
    testing.check_drift_of_branch(Linear(0.8), samples=1000)
    with pytest.raises(AssertionError, match="drift must be"):
        testing.check_drift_of_branch(Linear(0.8, excess=0.05), samples=1000)


def test_the_solvers_step_of_a_chain_with_much_noise_is_right():
    """Its weights would take a step of 0.02 in two parts, and half of it whole."""
    testing.check_solver_step(shaped.ShapedFeedForward(0.8) >> shaped.ShapedFeedForward(0.8))


def test_slopes_of_unequal_size_are_right():
    """Their networks approach the limit only like n^(-1/2)."""
    for slopes in ((0.0, -1.0), (0.5, -3.5)):
        testing.check_drift_of_branch(shaped.ShapedFeedForward(0.8, *slopes))


@dataclass(frozen=True)
class Expected(ResidualLayer):
    """A drift of V with the bias of a shaped ReLU, 1/(a² + e²), and without noise."""

    c_plus: float
    c_minus: float
    factor: float = 1.0
    gamma: float = 1.0
    lam: float | None = None

    def drift(self, V):
        return self.factor * V

    def limit(self):
        raise AssertionError("the check of the drift needs no noise")

    def branch(self, L, sizes, stream):
        slopes = [1 + c / sizes.n**0.5 for c in (self.c_plus, self.c_minus)]
        return (L * (1 + 2 / (slopes[0] ** 2 + slopes[1] ** 2) / sizes.n) ** 0.5,)

    def module(self, n, n_k=None, **draw):
        raise AssertionError("the check of the drift needs no module")


def test_slopes_of_any_size_are_right_or_need_wider_networks():
    """What the extrapolation leaves is not taken for an error of the layer, and does not hide one of 5 %."""
    for slopes in ((0.0, -6.0), (-12.5, 1.5), (-30.0, 15.0)):  # at n, 4n or 16n
        testing.check_drift_of_branch(Expected(*slopes))
        with pytest.raises(AssertionError, match="drift must be"):
            testing.check_drift_of_branch(Expected(*slopes, factor=1.05))
    with pytest.raises(AssertionError, match="or n be larger, got"):
        testing.check_drift_of_branch(Expected(-80.0, 0.0))
    testing.check_drift_of_branch(Expected(-80.0, 0.0), n=4096)


def test_noise_that_hides_the_drift_is_named():
    with pytest.raises(AssertionError, match=r"samples must be about .* or control be given, got 1000"):
        testing.check_drift_of_steps(Linear(0.8), n=16, samples=1000)


def test_widths_fit_the_tokens_and_the_heads():
    testing.check_survival(shaped.ShapedFeedForward(0.8), m=5)
    testing.check_survival(shaped.ShapedAttention(0.8, heads=3))
    assert law.find_width(shaped.ShapedAttention(0.8, heads=3, rope=100.0), 7) == 12  # 3 heads with keys of even width
    assert law.find_key_width(shaped.ShapedAttention(0.8, rope=100.0), 12, 5) == 6
    for heads in (1, 8):
        testing.check_module(shaped.ShapedAttention(0.8, 0.4, heads=heads), networks=200, samples=2000)


def test_pairs_of_both_signs_remove_what_is_odd():
    """With a control little noise is left, so that few samples are enough. Unpaired, this number is 11."""
    layer, V = shaped.ShapedFeedForward(0.8, activation=shaped.ShapedGELU(0.7)), testing.random_covariance(3, 56)
    changes = [partial(drift._average_step, each) for each in (layer, shaped.ShapedFeedForward(0.8, 0.0, 0.0))]
    means = torch.stack(drift.draw_drifts(changes, V, Sizes(256), range(64), 16, 1))
    noise = means.std(0) * 16**0.5
    assert (noise / layer.drift(V).abs().max()).max() < 1.0


def test_errors_say_what_is_wrong():
    """pytest rewrites a bare assert of this repository, not one of an installed package."""
    source = "".join(Path(part.__file__ or "").read_text() for part in (drift, law, limit))
    bare = [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert) and node.msg is None]
    assert not bare
    with pytest.raises(ValueError, match=r"layer must be a layer.*got 'gelu'"):
        testing.check_contract("gelu")  # pyright: ignore[reportArgumentType] (wrong on purpose)


def test_a_check_that_accepts_what_is_wrong_is_rejected():
    with pytest.raises(AssertionError, match="5 % off"):
        testing.assert_rejected(lambda: None)
    testing.assert_rejected(lambda: testing.assert_mean(torch.ones(10) + torch.arange(10) * 1e-9, 2.0))


@pytest.mark.parametrize("function", [shaped.solve, shaped.propagate])
def test_every_run_option_is_a_keyword_with_one_default(function):
    here, there = (inspect.signature(each).parameters for each in (function, shaped.solve))
    for option in fields(RunOptions):
        assert here[option.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert here[option.name].default == there[option.name].default
