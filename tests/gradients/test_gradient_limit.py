"""The limit of the gradients: one layer's mean and noise, and whole networks."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from gradient_limit import ShapedAttentionLimit, draw_networks, solve_gradients
from one_layer import MIRRORED, Changes, draw_changes
from torch import Tensor

import shaped
from shaped.covariance import factor
from shaped.testing.stats import assert_covariance, assert_mean, assert_rejected, assert_same_moments, generator

SMALL = 1e-8
"""A step so short that all but its first order vanishes."""


def make_state(m: int) -> tuple[Tensor, Tensor, Tensor]:
    """V, R and C."""
    V, R = (torch.linspace(*ends, m, dtype=torch.float64).diag() for ends in ((0.4, 2.0), (2.4, 1.4)))
    V, R = V + 0.3, R - 0.4
    return V, R, torch.linspace(1.5, -2.5, m * m, dtype=torch.float64).reshape(m, m)


def draw_layer(limit: ShapedAttentionLimit, m: int, n: int, samples: int, number: int, **options: Any) -> Changes:
    layer = shaped.ShapedAttention(limit.gamma, limit.tau0, mask=limit.mask)
    return draw_changes(layer, *make_state(m), n, samples, number, **options)


def find_roots(left: Tensor, right: Tensor) -> Tensor:
    """The matrices of which left G rightᵀ is the sum, with one normal number each. [pair, m, m]"""
    return torch.einsum("ai,bj->ijab", left, right).flatten(0, 1)


class Step:
    """How V, R and C change in a short step of the solver, as a function of N and Xi: quadratic in each."""

    def __init__(self, limit: ShapedAttentionLimit, m: int):
        self.limit, self.state, self.zero = limit, torch.stack(make_state(m)), torch.zeros(m, m, dtype=torch.float64)

    def take(self, N: Tensor, Xi: Tensor) -> Tensor:
        """[..., 3, m, m]"""
        N, Xi = torch.broadcast_tensors(N, Xi)
        V, R, C = self.state
        moved = torch.stack([self.limit.step_forward(V, N, SMALL), *self.limit.step_back(V, R, C, N, Xi, SMALL)], -3)
        return moved - self.state

    def find_drift(self) -> Tensor:
        """The sum of the even parts in each normal number."""
        L, R = factor(self.state[0]), self.state[1]
        rest = self.take(self.zero, self.zero)
        total = rest
        for N, Xi in ((find_roots(L / self.limit.tau0, L), self.zero), (self.zero, find_roots(factor(R), L))):
            total = total + ((self.take(N, Xi) + self.take(-N, -Xi)) / 2 - rest).sum(0)
        return total / SMALL

    def find_noise(self, N: Tensor, Xi: Tensor) -> Tensor:
        """What is odd in N."""
        return (self.take(N, Xi) - self.take(-N, Xi)) / (2 * SMALL**0.5)


LIMIT = ShapedAttentionLimit(0.7, 0.5)


def test_the_softmax_is_expanded_to_second_order():
    N = torch.randn(3, 3, generator=generator(73), dtype=torch.float64)
    for mask, bias in ((None, torch.zeros(3, 3)), ("causal", torch.full((3, 3), -torch.inf).triu(1))):
        P, E, E2 = ShapedAttentionLimit(0.5, mask=mask).expand_softmax(N)
        there, back = (torch.softmax(sign * 1e-4 * N + bias, -1) for sign in (1, -1))
        assert torch.allclose((there - back) / 2e-4, E, atol=1e-7)
        assert torch.allclose((there + back - 2 * P) / 2e-8, E2, atol=1e-6)


@pytest.mark.parametrize(("m", "mask", "samples"), [(1, None, 200), (2, None, 700), (3, "causal", 600)])
def test_one_layer_has_the_drift_of_the_limit(m, mask, samples):
    """One token keeps C."""
    limit, n = replace(LIMIT, mask=mask), 1024
    drawn, drift = draw_layer(limit, m, n, samples, 70, signs=MIRRORED), Step(limit, m).find_drift()
    for changes, expected, bias in ((drawn.R, drift[1], 16 / n if m > 1 else 1 / n), (drawn.C, drift[2], 20 / n * drift[2].abs())):
        rows = drawn.average(changes)
        assert_mean(rows, expected, bias=bias)
        for wrong in (0.95, 1.05) if expected.any() else ():
            assert_rejected(partial(assert_mean, rows, wrong * expected, bias=bias))


def test_one_layer_has_the_noise_of_the_limit():
    """That of the logits, network by network to leading order: alone, and for C also together with the overlaps."""
    limit, n = replace(LIMIT, tau0=1.0), 1024
    step, drawn = Step(limit, 2), draw_layer(limit, 2, n, 400, 71, signs=MIRRORED)
    changes = torch.stack([drawn.V, drawn.R, drawn.C], -3) / n**0.5
    alone = step.find_noise(drawn.N, step.zero)
    together = step.find_noise(drawn.N, drawn.Xi) - alone
    found = torch.cat([torch.tensordot(MIRRORED.query, changes, 1) / len(changes), (changes[0] - alone)[:, 2:]], 1)
    expected = torch.cat([alone, together[:, 2:]], 1)  # of V, R, C and C
    size = expected.square().sum((-2, -1))

    slopes = (found * expected).sum((-2, -1)) / size.mean(0)
    shares = size / size.mean(0)
    assert_mean(slopes - shares, 0.0, bias=0.012)
    for part in range(4):
        for wrong in (0.95, 1.05):
            assert_rejected(partial(assert_mean, (slopes - wrong * shares)[:, part], 0.0, bias=0.012))


def test_weights_give_the_token_and_its_gradient_independent_noise():
    n, limit, (V, R, _) = 128, ShapedAttentionLimit(0.6), make_state(1)
    drawn = draw_layer(limit, 1, n, 50_000, 72)
    rows = torch.cat([drawn.V[0, :, 0], drawn.R[0, :, 0]], -1) / n**0.5
    expected = 2.0 * limit.weights.scale * torch.block_diag(V, R).square()
    assert_covariance(rows, expected, bias=1 / n)
    for wrong in (0.95, 1.05):
        assert_rejected(partial(assert_covariance, rows, wrong * expected, bias=1 / n))


def test_networks_follow_the_limit():
    """Jointly with the loss and the last covariance. Those with new matrices on the way back have another limit."""
    limit, V0 = ShapedAttentionLimit(0.6), shaped.equicorrelated(2, 0.2)
    drawn, wrong = (stack_rows(draw_networks(limit, V0, 48, 0.5, 3000, 53, way)) for way in (False, True))
    solved, uncoupled = (stack_rows(solve_gradients(limit, V0, 0.5, 40, 3000, 51, way)) for way in (False, True))
    assert_same_moments(drawn, solved)
    assert_same_moments(wrong, uncoupled)
    assert_rejected(partial(assert_same_moments, wrong, solved))


def stack_rows(found: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(found.values()), -1)
