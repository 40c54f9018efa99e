"""Schedules of the shaping: what they leave of it, and what they refuse."""

import math
from typing import Any

import pytest
from torch import nn

from refusals import refused
from shaped.nn import Fixed, Learn, Recover, ShapedEncoder, ShapedFeedForwardBlock

N, HEADS = 12, 2


def test_what_schedules_leave_of_the_shaping():
    assert [schedule.share(step) for schedule in (Fixed(), Learn()) for step in (0, 9000)] == 4 * [1.0]
    assert [Recover(4).share(step) for step in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert Recover().share(2000) == 0.5  # the paper's 4000 steps


@pytest.mark.parametrize("schedule", [Recover(5), Learn()])
def test_a_schedule_without_gains_to_change_is_refused(schedule):
    """It would do nothing, in silence; so on a stock model with attn_implementation="shaped", whose gains are constants."""
    with refused("model must have gains", repr(schedule), "Linear", "shaped.hf.shape"):
        schedule.apply(nn.Linear(2, 2), 2)
    Fixed().apply(nn.Linear(2, 2), 2)


@pytest.mark.parametrize("made_with", [Fixed(), Recover(5)])
def test_learn_is_refused_where_nothing_is_trained(made_with):
    """It would do nothing, in silence; so on a stock model that was shaped without learn=True."""
    with refused("schedule must be", "Learn()", "not trained", "learn=True"):
        Learn().apply(ShapedEncoder(1, N, HEADS, gamma=0.3, schedule=made_with), 0)
    Learn().apply(ShapedEncoder(1, N, HEADS, gamma=0.3, schedule=Learn()), 0)
    Learn().apply(ShapedFeedForwardBlock(N, shaped=False), 0)  # a baseline has no gains


@pytest.mark.parametrize("step", [math.nan, -1, 2.5, True, None])
def test_a_step_that_is_none_is_refused(step: Any):
    encoder = ShapedEncoder(1, N, HEADS, gamma=0.3, schedule=Recover(10))
    with refused("step must be", str(step)):
        encoder.schedule.apply(encoder, step)
