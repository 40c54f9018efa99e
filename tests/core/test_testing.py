"""shaped.testing rejects layers whose faces differ; solve and propagate share their options."""

import inspect
from dataclasses import dataclass, fields

import pytest
import torch

import shaped
from shaped import testing
from shaped.engine import RunOptions
from shaped.layers.feedforward import ActivationDrift
from shaped.layers.terms import WeightNoise

CONTROL = shaped.ShapedFeedForward(0.8, 0.0, 0.0)


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
    testing.check_drift_of_branch(shaped.ShapedFeedForward(0.8, 4.0, -4.0), samples=20_000, control=CONTROL)
    for check, layer in (
        (lambda layer: testing.check_drift_of_branch(layer, samples=20_000, control=CONTROL), WrongDrift(0.8, 4.0, -4.0)),
        (lambda layer: testing.check_Sigma_of_steps(layer, n=256), WrongNoise(0.8, 4.0, -4.0)),
        (lambda layer: testing.check_module(layer, networks=2000, samples=20_000), WrongModule(0.8, 4.0, -4.0)),
        (testing.check_symmetry, Crooked(0.8, 4.0, -4.0)),
    ):
        with pytest.raises(AssertionError, match=r"standard errors|must"):  # not for want of power
            check(layer)


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
