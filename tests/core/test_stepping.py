"""The solver's step: it is not seen in the law by default, and says what it does where it is."""

import math
import pickle
import warnings

import pytest
import torch
from scipy.special import gammaincc

import shaped
from shaped import limit
from shaped.covariance import Point, correlation, largest_safe
from shaped.intervals import share_interval
from shaped.layers.logits import LogitPerturbation
from shaped.layers.terms import WeightNoise
from shaped.limit import default_steps
from shaped.randomness import GeneratorNormals
from shaped.stepping import moments, standard_error
from shaped.testing.stats import Z, assert_mean, generator, seed

TRANSFORMER = shaped.ShapedAttention(8**-0.5) >> shaped.ShapedFeedForward(8**-0.5)
EXPLOSIVE = shaped.ShapedAttention(0.7, 0.25, heads=8, project=True, mask="causal")
V0 = shaped.equicorrelated(4, 0.2)
T = 96 / 512


def assert_same_law(one: shaped.Trajectory, other: shaped.Trajectory) -> None:
    """The mean and the spread of rho and the share of stopped paths agree."""
    found, others = (moments(paths.V[-1], paths.stopped > paths.t[-1]) for paths in (one, other))
    for name in found:
        error = math.hypot(standard_error(found[name][1]), standard_error(others[name][1]))
        assert abs(found[name][0] - others[name][0]) < Z * error, name


def test_the_default_step_is_not_seen_near_explosion():
    """A seventh of these paths explodes; steps that do not shrink where V is large find half as many."""
    coarse = shaped.solve(EXPLOSIVE, V0, T=T, samples=8192, seed=seed(70), record="last", upper=1e4)
    fine = shaped.solve(EXPLOSIVE, V0, T=T, steps=76, samples=8192, seed=seed(71), record="last", upper=1e4)
    assert coarse.info["steps"] == 19
    assert 0.1 < fine.stopped_share < 0.2
    assert_same_law(coarse, fine)


def test_the_check_looks_at_every_kind_of_start():
    """Two matrices in turn: every 32nd path begins at the first, which is collapsed and on which no step is seen."""
    layer = shaped.ShapedAttention(0.8, 0.25, qk_norm=True) >> shaped.ShapedFeedForward(0.8)
    starts = torch.stack([torch.ones(3, 3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)]).repeat(8192, 1, 1)
    with pytest.warns(shaped.StepWarning, match="log V"):
        shaped.solve(layer, starts, T=0.5, steps=4, seed=seed(77), record="last", check=True)


ANTIPARALLEL = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
"""Two tokens that stay so under attention alone: V is v times this matrix, and 1/v a Bessel process of dimension 3 - heads/(2 gamma²)."""


@pytest.mark.parametrize(("length", "samples"), [(1.0, 250), (10.0, 50)])
def test_paths_come_back_from_any_length(length, samples):
    """At gamma 0.9 and one head the dimension is 2.4: no path explodes. Steps whose parts have a shortest length lose 5 % and 52 %."""
    found = shaped.solve(
        shaped.ShapedAttention(0.9, 0.6), length * ANTIPARALLEL, T=0.1, samples=samples, seed=seed(74), record="last", check=False
    )
    assert not found.stopped.isfinite().any()


def test_a_bound_is_seen_between_two_parts_of_a_step():
    """At gamma 0.9 paths pass 1e4 and come back within one step: by an exact simulation of v 0.89 % pass it until T = 0.3."""
    found = shaped.solve(
        shaped.ShapedAttention(0.9, 0.6), ANTIPARALLEL, T=0.3, samples=384, seed=seed(75), record="last", upper=1e4, check=False
    )
    low, high = share_interval(int(found.stopped.isfinite().sum()), len(found.stopped))
    assert low < 0.0089 < high


def test_the_share_of_exploding_paths_is_that_of_a_bessel_process():
    """By the logits alone: it reaches 0 before t with probability Q(1 - dimension/2, 1/(2 s² t)), s² = 4 variance, here 0.337."""
    gamma, rate, time, count = 8**-0.5, 2.0, 0.3, 20_000
    term, normals = LogitPerturbation(None, rate, gamma**2 * rate), GeneratorNormals(generator(76), V0)
    V = ANTIPARALLEL.expand(count, 2, 2)
    assert term.drift(V[:1])[0, 0, 0] == pytest.approx(rate)
    for _ in range(3):
        V = term.move(Point(matrix=V), time / 3, normals).V
        V = V[V[:, 0, 0] < largest_safe(V.dtype)]
    dimension, noise = 3 - 1 / (2 * gamma**2), 4 * gamma**2 * rate
    expected = float(gammaincc(1 - dimension / 2, 1 / (2 * noise * time)))
    error = math.sqrt(expected * (1 - expected) / count)
    assert abs(1 - len(V) / count - expected) < Z * error + 0.05 * expected  # of the order of NOISE


def test_the_default_step_is_not_seen_with_many_tokens():
    """128 tokens: the spread of rho is that of networks of width 512, 0.278. A step that caps its noise finds 0.264."""
    layer = shaped.ShapedAttention(0.5, heads=8, project=True, mask="causal")
    paths = shaped.solve(layer, shaped.equicorrelated(128, 0.2), T=T, samples=96, seed=seed(72), record="last")
    spread, influence = moments(paths.V[-1], paths.stopped > T)["rho_spread"]
    assert abs(spread - 0.278) < Z * standard_error(influence) < 0.011


def test_the_weights_step_is_right_to_second_order_in_the_correlation():
    """E[rho²] from orthogonal tokens: one step of p = scale·h = 0.05, against 16 short ones. Their difference is O(p³); 3/2 p² is seen."""
    p, samples, normals = 0.05, 400_000, GeneratorNormals(generator(73), V0)
    squares = []
    for parts in (1, 16):
        point = Point(matrix=torch.eye(2, dtype=torch.float64).expand(samples, 2, 2))
        for _ in range(parts):
            point = WeightNoise(1.0).move(point, p / parts, normals)
        squares.append(correlation(point.V)[:, 0, 1] ** 2)
    error = sum(x.var().item() / samples for x in squares) ** 0.5
    gap = abs(squares[0].mean() - squares[1].mean()).item()
    assert gap < Z * error + 3 * p**3
    assert 1.5 * p**2 > Z * error + 3 * p**3, "the term of second order would not be noticed"


@pytest.mark.parametrize("m", [1, 3, 12])
def test_the_weights_step_keeps_mean_and_covariance_at_any_length(m):
    """E[V'] = V and Cov[V'] = Sigma_lin/nu hold exactly, with 1/nu = p/(1 + 3p/2), also where p is not small; 5 % off is rejected."""
    p = WeightNoise(1.0).longest(m)  # the longest step that is taken whole
    V = shaped.equicorrelated(m, 0.3)
    term = WeightNoise(1.0)
    point = term.move(Point(matrix=V.expand(200_000, m, m)), p, GeneratorNormals(generator(74), V0))
    rows, columns = torch.triu_indices(m, m)
    x = point.V[:, rows, columns] - V[rows, columns]
    assert_mean(x, 0.0)
    variance = term.Sigma(V).diagonal() * p / (1 + 1.5 * p)
    assert_mean(x**2, variance)
    with pytest.raises(AssertionError):
        assert_mean(x**2, 1.05 * variance)


def test_a_long_step_of_the_weights_is_taken_in_parts():
    """p = 2 with 4 tokens: in one part it would need fewer degrees of freedom than tokens. log V has the variance 2p of the closed form."""
    point = WeightNoise(1.0).move(Point(matrix=V0.expand(100_000, 4, 4)), 2.0, GeneratorNormals(generator(75), V0))
    length = point.V.diagonal(dim1=-2, dim2=-1)[:, 3].log()
    assert_mean(length, -2.0, bias=0.1)
    assert_mean((length - length.mean()) ** 2, 4.0, bias=0.1)


def test_steps_are_chosen_from_layer_tokens_and_horizon():
    attention = shaped.ShapedAttention(0.5, heads=8, project=True)
    assert default_steps(attention, 4, 0.75) == 75
    assert default_steps(attention, 4, 1e-4) == 1
    assert default_steps(attention, 128, T) == math.ceil(T * 2 * 129 * 0.5)  # nu of the weights' noise is at least 2(m + 1)
    assert default_steps(shaped.ShapedFeedForward(1.0, 0.0, -20.0), 4, 0.75) == 750  # a tenth of the ReLU's time, 4/400
    assert default_steps(shaped.ShapedPerceptron(0.0, -1e9), 4, 0.75) == 1200  # not for ever
    for mask in (None, shaped.alibi(4, 8)):  # biases of their own make no head faster than it is beside the others
        heads = shaped.ShapedAttention(0.7, 0.1, 8, project=True, mask=mask, qk_norm=True)
        assert default_steps(heads, 4, 0.75) == math.ceil(0.75 * 1.5 * 49.0 / 0.2)
    bent = shaped.solve(shaped.ShapedPerceptron(0.0, -1e6), V0, T=0.01, samples=2, seed=0)  # a ReLU bent so much makes the tokens one
    assert bent.rho[-1].min() > 0.9
    with pytest.raises(ValueError, match=r"^T must be at most 1e\+07, .* got 1e\+09$"):
        shaped.solve(attention, V0, T=1e9, seed=0)
    with pytest.raises(ValueError, match=r"^steps must be at least 100 for T = 10000 "):
        shaped.solve(attention, V0, T=1e4, steps=1, seed=0)


@pytest.mark.parametrize(("method", "steps", "pairs"), [("cone", 6, 1024), ("euler", 8, 2048)])
def test_the_estimate_is_what_halving_the_step_does(monkeypatch, method, steps, pairs):
    """Against independent paths. Euler's change is large enough to be seen; the cone's, of rho, has less than half the error of
    independent pairs, since both paths of a pair have the same noise.
    """
    monkeypatch.setattr(limit, "PAIRS", pairs)  # else 32 paths are drawn for each pair
    how = {"T": 0.75, "record": "last", "upper": 1e4, "method": method}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shaped.StepWarning)
        whole = shaped.solve(TRANSFORMER, V0, steps=steps, samples=4 * pairs, seed=seed(76), check=True, **how)
    effect = whole.info["step_effect"]
    assert effect.pairs == pairs
    halved = shaped.solve(TRANSFORMER, V0, steps=2 * steps, samples=4 * pairs, seed=seed(77), **how)
    coarse, fine = (moments(paths.V[-1], paths.stopped > 0.75) for paths in (whole, halved))
    is_seen = False
    for name in ("rho_mean", "rho_spread", "log_variance_mean", "log_variance_spread"):
        change, error = getattr(effect, name)
        tolerance = Z * math.hypot(error, standard_error(coarse[name][1]), standard_error(fine[name][1]))
        if method == "cone" and name.startswith("rho"):  # a few paths of large variance decide the error of the variances
            assert error < math.sqrt(2.0) * standard_error(fine[name][1][:pairs]) / 2
        assert abs(change - (fine[name][0] - coarse[name][0])) < tolerance
        is_seen |= abs(change) > tolerance
    assert is_seen or method == "cone", "an estimate of 0, or of the wrong sign, would pass"


def test_a_step_that_is_seen_is_warned_of():
    """One step to t = 0.75; the default's 75 are not warned of (warnings are errors in these tests)."""
    block = shaped.ShapedAttention(0.9) >> shaped.ShapedFeedForward(0.9)
    with pytest.warns(shaped.StepWarning, match=r"steps = 1 are seen in the law: .*spread of rho by .* steps=\d+ would"):
        shaped.solve(block, V0, T=0.75, steps=1, samples=2**15, seed=seed(78), record="last", upper=100.0, check=True)
    paths = shaped.solve(TRANSFORMER, V0, T=0.75, samples=2048, seed=seed(79), record="last")
    assert paths.info["step_effect"].pairs == 64
    assert "step_effect" not in repr(paths)


def test_who_is_checked():
    def run(**how):
        return shaped.solve(TRANSFORMER, V0, T=0.05, seed=0, **how).info

    assert "step_effect" not in run(samples=511)
    assert "step_effect" in run(samples=512)
    assert "step_effect" not in run(samples=512, steps=5)
    assert "step_effect" not in run(samples=512, check=False)
    assert run(samples=40, steps=5, check=True)["step_effect"].pairs == 16


def test_the_check_changes_nothing_of_the_paths():
    one, other = (shaped.solve(TRANSFORMER, V0, T=0.05, samples=512, seed=80, check=check) for check in (True, False))
    assert torch.equal(one.V, other.V)


def test_one_token_has_no_correlation_to_look_at():
    """But a length: four steps to t = 0.75 are seen in it."""
    with pytest.warns(shaped.StepWarning, match=r"of log V by -"):
        paths = shaped.solve(
            shaped.ShapedPerceptron(), torch.ones(1, 1), T=0.75, steps=4, samples=2**17, seed=seed(82), record="last", check=True
        )
    assert paths.info["step_effect"].rho_mean is None
    assert paths.info["step_effect"].stopped_share == (0.0, 1 / 4096)


def test_a_bound_that_many_paths_come_near_is_checked_between_the_steps_too():
    """32 % of the paths are seen to pass 4 in 10 steps, 36 % in 20."""
    with pytest.warns(shaped.StepWarning, match=r"the share of stopped paths by \+0.0"):
        shaped.solve(TRANSFORMER, V0, T=0.75, steps=10, samples=2**15, seed=seed(83), record="last", upper=4.0, check=True)


def test_starts_that_differ_are_all_checked():
    """The first of them are short, and would not stop whatever the step."""
    starts = torch.cat([1e-3 * V0.expand(256, 4, 4), V0.expand(768, 4, 4)])
    effect = shaped.solve(EXPLOSIVE, starts, T=T, steps=19, seed=seed(84), record="last", upper=1e4, check=True).info["step_effect"]
    assert effect.pairs == 32
    assert effect.log_variance_spread[0] != 0.0
    whole, own = (moments(paths, torch.ones(len(paths), dtype=torch.bool))["log_variance_spread"][0] for paths in (starts, starts[::32]))
    assert own == pytest.approx(whole)


def test_steps_too_short_for_single_precision_do_nothing():
    paths = shaped.solve(shaped.ShapedAttention(1e-20), V0, T=0.1, steps=5, samples=5, seed=0, dtype=torch.float32)
    assert not paths.stopped.isfinite().any()
    assert torch.allclose(paths.V[-1], V0.float().expand(5, 4, 4))


def test_long_tokens_that_coincide_stay_together_in_single_precision():
    """Attention between equal tokens does nothing, however long they are; rounding must not make it explode."""
    paths = shaped.solve(TRANSFORMER, 1e5 * torch.ones(4, 4), T=0.1, samples=64, seed=0, dtype=torch.float32)
    assert not paths.stopped.isfinite().any()


def test_biases_of_heads_travel_to_workers_once():
    layer = shaped.ShapedAttention(0.5, heads=16, project=True, mask=shaped.alibi(64, 16))
    assert len(pickle.dumps(layer.terms)) < 1.1 * 16 * 64 * 64 * 8


def test_shares_have_wilsons_interval():
    """Against the roots of its defining equation, (share - p)² = z² p(1 - p)/n."""
    for happened, count in ((0, 4096), (3, 4096), (5, 10), (10, 10)):
        low, high = share_interval(happened, count)
        for end in (low, high):
            if 0.0 < end < 1.0:
                assert (happened / count - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / count)
        assert low <= happened / count <= high
        assert high > low
    paths = shaped.solve(EXPLOSIVE, V0, T=T, samples=64, seed=0, record="last")
    assert paths.stopped_interval == share_interval(int(paths.stopped.isfinite().sum()), 64)


def test_euler_stops_a_path_whose_eigenvalues_cannot_be_found(monkeypatch):
    """LAPACK fails on one matrix and torch refuses the whole batch; the other paths go on."""
    usual = torch.linalg.eigh

    def failing(V):
        if (V[:, 0, 0] > 1.5).any():
            raise torch.linalg.LinAlgError("did not converge")  # pyright: ignore[reportPrivateImportUsage]
        return usual(V)

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    starts = torch.stack([V0, 2.0 * V0, V0]).float()
    paths = shaped.solve(shaped.ShapedPerceptron(), starts, T=1e-6, steps=2, seed=0, method="euler", dtype=torch.float32)
    assert paths.stopped.isfinite().tolist() == [False, True, False]
    assert paths.V.isfinite().all()


def test_the_first_state_is_exactly_symmetric():
    """Also where V0, from single precision, is a little indefinite and had to be put right."""
    X = torch.randn(9, 2, generator=generator(81))
    paths = shaped.solve(shaped.ShapedPerceptron(), X @ X.mT, T=0.1, steps=1, samples=2, seed=0)
    assert torch.equal(paths.V[0], paths.V[0].mT)
