"""The solver against closed forms, its order, and what it promises at any step size."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.linalg import solve_banded
from scipy.stats import norm

import shaped
from shaped import engine
from shaped.limit import ConeSteps, HalvedSteps
from shaped.stepping import moments, standard_error
from shaped.testing.stats import Z, assert_distribution, assert_mean, generator, seed

ONE = torch.ones(1, 1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("layer", "variance"),
    [
        (shaped.ShapedFeedForward(0.7), 4 * 0.49),
        (shaped.ShapedPerceptron(), 2.0),
        (shaped.ShapedAttention(0.7), 2 * 0.49 * (2 - 0.49)),
        (shaped.ShapedAttention(0.7, heads=4, project=True), 4 * 0.49),
        (shaped.ShapedAttention(0.5) >> shaped.ShapedFeedForward(0.5), 2 * 0.25 * 1.75 + 4 * 0.25),
    ],
    ids=["feed-forward", "perceptron", "attention", "projected", "chain"],
)
@pytest.mark.parametrize("method", ["cone", "euler"])
def test_one_token_is_log_normal(layer, variance, method):
    """log V_T ~ N(log V_0 - s²T/2, s²T). Variance, mean and distribution; a variance 5 % off is rejected."""
    T, steps = 0.04, 10
    paths = shaped.solve(layer, 2.0 * ONE, T=T, steps=steps, samples=200_000, seed=seed(20), method=method, record="last")
    z = (paths.V[-1, :, 0, 0].log() - math.log(2.0) + variance * T / 2) / math.sqrt(variance * T)
    h = variance * T / steps
    assert_mean(z, 0.0, bias=0.5 * h)
    # A step of Euler multiplies by 1 + x, x ~ N(0, h), and Var log(1 + x) = h + 2.5 h² + O(h³).
    square, bias = (1.0 + 2.5 * h, 0.5 * h) if method == "euler" else (1.0, 1.5 * h)
    assert_mean(z**2, square, bias=bias)
    points = np.linspace(-8, 8, 4001)
    assert_distribution(z, points, norm.cdf(points), bias=0.5 * h)
    with pytest.raises(AssertionError):
        assert_mean(z**2, 1.05 * square, bias=bias)


def fokker_planck(noise: float, relu: float, rho0: float, T: float) -> tuple[np.ndarray, np.ndarray]:
    """The distribution function of rho_T for d rho = [relu·nu(rho) - noise·rho(1-rho²)] dt + sqrt(2·noise)(1-rho²) dB.

    In z = artanh(rho) the noise is constant: dz = [relu·nu/(1-rho²) + noise·rho] dt + sqrt(2·noise) dB. Implicit finite volumes on
    a fine grid, started from a narrow normal. A grid twice as fine, with four times the steps, changes the result by less than 1e-4.
    """
    edges = np.linspace(-9.0, 9.0, 3001)
    width = edges[1] - edges[0]
    centres, inner = (edges[1:] + edges[:-1]) / 2, edges[1:-1]
    rho = np.tanh(inner)
    nu = (np.sqrt(1 - rho**2) - rho * np.arccos(rho)) / (2 * np.pi)
    speed = relu * nu / (1 - rho**2) + noise * rho
    spread = 3 * width
    density = norm.pdf(centres, np.arctanh(rho0), spread)
    density /= density.sum() * width
    steps = 1000
    dt = (T - spread**2 / (2 * noise)) / steps
    # The flow through an edge is speed·(left + right)/2 - noise·(right - left)/width; none goes through the ends.
    from_left, from_right = speed / 2 + noise / width, speed / 2 - noise / width
    out = np.zeros(len(centres))
    out[:-1] += from_left
    out[1:] -= from_right
    banded = np.zeros((3, len(centres)))
    banded[0, 1:] = from_right
    banded[1] = out
    banded[2, :-1] = -from_left
    half = banded * (dt / (2 * width))
    for _ in range(steps):  # Crank-Nicolson
        flow = half[1] * density
        flow[:-1] += half[0, 1:] * density[1:]
        flow[1:] += half[2, :-1] * density[:-1]
        matrix = half.copy()
        matrix[1] += 1.0
        density = solve_banded((1, 1), matrix, density - flow)
    return np.tanh(edges), np.concatenate([[0.0], np.cumsum(density) * width])


@pytest.mark.parametrize(
    ("layer", "noise", "relu"),
    [
        (shaped.ShapedFeedForward(0.8, 0.5, -3.5), 0.64, 0.64 * 16.0),
        (shaped.ShapedPerceptron(0.0, -3.0), 0.5, 9.0),
    ],
    ids=["feed-forward", "perceptron"],
)
def test_two_tokens_follow_the_fokker_planck_equation(layer, noise, relu):
    points, cdf = fokker_planck(noise, relu, 0.2, 1.0)
    V0 = shaped.equicorrelated(2, 0.2)
    paths = shaped.solve(layer, V0, T=1.0, steps=50, samples=200_000, seed=seed(21), record="last")
    rho = paths.rho[-1, :, 0, 1]
    assert_distribution(rho, points, cdf, bias=0.002)
    for wrong in ({"relu": 1.05 * relu, "noise": noise}, {"relu": relu, "noise": 1.05 * noise}):
        off_points, off_cdf = fokker_planck(rho0=0.2, T=1.0, **wrong)
        with pytest.raises(AssertionError):
            assert_distribution(rho, off_points, off_cdf, bias=0.002)


TRANSFORMER = shaped.ShapedAttention(0.6, 0.8) >> shaped.ShapedFeedForward(0.6, 0.5, -2.5)
UPPER = 30.0  # paths past it stop: explosions have no moments, and a few paths far above would take nearly all of the time


def statistics(steps: int, samples: int, method: str) -> torch.Tensor:
    """log(1 - rho²), rho² and log V of TRANSFORMER at T = 1/2, [sample, 3]."""
    paths = shaped.solve(
        TRANSFORMER,
        shaped.equicorrelated(2, 0.4),
        T=0.5,
        steps=steps,
        samples=samples,
        seed=seed(22),
        method=method,
        record="last",
        upper=UPPER,
    )
    V, rho = paths.V[-1], paths.rho[-1, :, 0, 1].clamp(-1 + 1e-12, 1 - 1e-12)
    return torch.stack([torch.log1p(-(rho**2)), rho**2, V[:, 0, 0].log()], -1)


def draw_changes(steps: int, pairs: int) -> torch.Tensor:
    """What halving the step does to rho² of TRANSFORMER at T = 1/2, path by path. Both have the same noise, which leaves a tenth of the
    variance of independent paths. That such pairs have the law of two runs is tested in `test_stepping.py`."""
    h, terms = 0.5 / steps, [term.stopping_at(UPPER) for term in TRANSFORMER.terms]
    half = ConeSteps(tuple(term.halved() for term in terms), h / 2)
    process = HalvedSteps(ConeSteps(tuple(terms), h), half, engine.Bounds(UPPER, None))
    options = engine.RunOptions(samples=2 * pairs, seed=seed(22), record="last", upper=UPPER, device="cpu", dtype=torch.float64)
    paths = engine.run(process, shaped.equicorrelated(2, 0.4), options, steps=steps, dt=h, info={})
    squares = paths.rho[-1, :, 0, 1] ** 2
    return squares[1::2] - squares[::2]


def test_weak_order_one():
    """Halving the step at least halves the error. The change from one step to its half shows it; order 1/2 would fail."""
    changes = [draw_changes(steps, pairs) for steps, pairs in ((1, 30_000), (2, 45_000))]
    coarse, fine = (abs(f.mean().item()) for f in changes)
    errors = [f.std().item() / len(f) ** 0.5 for f in changes]
    error = math.hypot(errors[1], 0.5 * errors[0])  # of fine - coarse/2
    assert fine < coarse / 2 + Z * error
    assert coarse / math.sqrt(2) > coarse / 2 + Z * error, "order 1/2 would not be noticed"


def test_euler_agrees_as_the_step_goes_to_zero():
    gaps = []
    for steps in (25, 100):
        cone, euler = (statistics(steps, 2**15, method) for method in ("cone", "euler"))
        error = (cone.var(0) + euler.var(0)).sqrt() / 2**7.5
        gaps.append((cone.mean(0) - euler.mean(0)).abs())
        assert (gaps[-1] < Z * error + 12.0 * 0.5 / steps).all()
    assert (gaps[1] < gaps[0] / 2 + Z * error).all()


@given(
    m=st.integers(1, 16),
    exponent=st.floats(0.0, 12.0),
    h=st.floats(1e-3, 1.0),
    gamma=st.floats(0.0, 1.0),
    tau0=st.floats(0.1, 10.0),
    kind=st.sampled_from(["attention", "causal", "transformer", "perceptron"]),
    method=st.sampled_from(["cone", "cone", "euler"]),
    key=st.integers(0, 2**31),
)
@example(m=16, exponent=12.0, h=1.0, gamma=1.0, tau0=0.1, kind="transformer", method="cone", key=0)
@example(m=7, exponent=12.0, h=1e-3, gamma=0.5, tau0=0.1, kind="transformer", method="cone", key=1)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_state_is_a_covariance_matrix(m, exponent, h, gamma, tau0, kind, method, key):
    g = torch.Generator().manual_seed(key)
    Q, _ = torch.linalg.qr(torch.randn(m, m, generator=g, dtype=torch.float64))
    V0 = Q @ torch.diag(10 ** torch.linspace(0, -exponent, m, dtype=torch.float64)) @ Q.mT
    layer = {
        "attention": shaped.ShapedAttention(gamma, tau0),
        "causal": shaped.ShapedAttention(gamma, tau0, mask="causal"),
        "transformer": shaped.ShapedAttention(gamma, tau0) >> shaped.ShapedFeedForward(gamma),
        "perceptron": shaped.ShapedPerceptron(),
    }[kind]
    paths = shaped.solve(layer, (V0 + V0.mT) / 2, T=12 * h, steps=12, samples=5, seed=key, method=method)
    assert torch.equal(paths.V, paths.V.mT)
    assert paths.V.isfinite().all()
    assert paths.rho.isfinite().all()
    scaled = paths.V / paths.V.abs().amax((-2, -1), keepdim=True)
    assert (torch.linalg.eigvalsh(scaled)[..., 0] >= -1e-13 * m).all()
    assert not paths.stopped.isnan().any()
    assert (paths.stopped[paths.stopped.isfinite()] <= 12 * h * (1 + 1e-12)).all()


def test_collapsed_and_degenerate_starts():
    """Identical tokens, a token of length zero, fewer dimensions than tokens."""
    block = shaped.ShapedAttention(0.5) >> shaped.ShapedFeedForward(0.5)
    for m in (4, 9):
        collapsed = torch.ones(m, m, dtype=torch.float64)
        paths = shaped.solve(block, collapsed, T=0.5, steps=50, samples=64, seed=seed(23))
        assert (1 - paths.rho[-1]).abs().max() < 1e-6
        assert paths.V[-1].diagonal(dim1=-2, dim2=-1).std() > 0.1
        nothing = torch.eye(m, dtype=torch.float64)
        nothing[0, 0] = 0.0
        paths = shaped.solve(block, nothing, T=0.5, steps=50, samples=64, seed=seed(24))
        assert paths.V[:, :, 0].abs().max() < 1e-100
        assert paths.rho.isfinite().all()
        X = torch.randn(m, 2, generator=generator(25), dtype=torch.float64)
        paths = shaped.solve(block, X @ X.mT, T=0.5, steps=50, samples=64, seed=seed(26))
        assert paths.V.isfinite().all()


def test_explosion_is_an_outcome():
    """An adversarial start (Fig. stability): many paths blow up, each stops at a time of its own, the others go on."""
    V0 = 10.0 * shaped.equicorrelated(4, 0.2)
    paths = shaped.solve(shaped.ShapedAttention(0.2), V0, T=1.0, steps=200, samples=500, seed=seed(27))
    stopped = paths.stopped.isfinite()
    assert 0 < stopped.sum() < 500
    assert paths.stopped[stopped].unique().numel() > 10
    assert paths.V.isfinite().all()
    first = paths.stopped[stopped].argmin()
    path = paths.V[:, stopped][:, first]
    after = paths.t > paths.stopped[stopped].min()
    assert (path[after] == path[after][0]).all()


def test_bounds_stop_at_eigenvalues():
    paths = shaped.solve(
        shaped.ShapedAttention(0.8), shaped.equicorrelated(3, 0.5), T=0.2, steps=100, samples=300, seed=seed(28), upper=8.0, lower=0.05
    )
    eigenvalues = torch.linalg.eigvalsh(paths.V)
    outside = (eigenvalues[..., -1] > 8.0) | (eigenvalues[..., 0] < 0.05)
    ever, first = outside.any(0), outside.int().argmax(0)
    assert 0 < ever.sum() < 300
    assert torch.equal(paths.stopped.isfinite(), ever)
    assert torch.allclose(paths.stopped[ever], paths.t[first[ever]])


def test_stopped_paths_show_where_they_stopped():
    """Paths that explode between two steps too: those above `upper` are the stopped ones, as for networks."""
    layer, V0 = shaped.ShapedAttention(0.35, tau0=0.25), shaped.equicorrelated(4, 0.2)
    paths = shaped.solve(layer, V0, T=1.5, samples=256, seed=seed(29), upper=1e4, record="last")
    stopped, largest = paths.stopped.isfinite(), torch.linalg.eigvalsh(paths.V[-1])[:, -1]
    assert 0.3 < stopped.double().mean() < 0.7
    assert torch.equal(largest > 1e4, stopped)
    assert (largest[stopped] < 2e4).double().mean() > 0.9
    assert torch.linalg.matrix_rank(paths.V[-1]).eq(4).all(), "a path keeps its correlations"


def test_same_seed_same_bits_whatever_the_chunk():
    block = shaped.ShapedAttention(0.5) >> shaped.ShapedFeedForward(0.5)
    for m, samples in ((3, 9000), (12, 300)):
        V0 = shaped.equicorrelated(m, 0.3)
        with ThreadPoolExecutor(2) as threads:
            runs = [shaped.solve(block, V0, T=0.1, steps=5, samples=samples, seed=29)]
            for chunk in (None, 1, 1000, 5000, 10**6):
                runs.append(shaped.solve(block, V0, T=0.1, steps=5, samples=samples, seed=29, chunk=chunk, executor=threads))
        assert all(torch.equal(run.V, runs[0].V) and torch.equal(run.stopped, runs[0].stopped) for run in runs)
        other = shaped.solve(block, V0, T=0.1, steps=5, samples=samples, seed=30)
        assert not torch.equal(other.V[-1], runs[0].V[-1])
        assert len(runs[0].V[-1, :, 0, 1].unique()) == samples  # no two blocks share a stream


def test_recording():
    def run(record):
        return shaped.solve(shaped.ShapedPerceptron(), shaped.equicorrelated(2, 0.1), T=0.5, steps=10, samples=7, seed=31, record=record)

    every = run("all")
    assert every.V.shape == every.rho.shape == (11, 7, 2, 2)
    assert torch.allclose(every.t, torch.linspace(0, 0.5, 11, dtype=torch.float64))
    assert torch.equal(run("last").V, every.V[-1:])
    assert torch.equal(run("last").t, every.t[-1:])
    assert torch.equal(run(4).V, every.V[[0, 4, 8, 10]])
    assert torch.equal(run(100).t, every.t[[0, 10]])


def test_each_path_can_have_its_own_start():
    V0 = torch.stack([shaped.equicorrelated(3, rho) for rho in (0.0, 0.5, 0.9)])
    paths = shaped.solve(shaped.ShapedPerceptron(), V0, T=0.1, steps=1, seed=32)
    assert torch.equal(paths.V[0], V0)


def test_single_precision_agrees_with_double():
    """Means and spreads of correlations and variances; normals that are 5 % too large are seen in the spread of the correlations."""
    block, V0 = shaped.ShapedAttention(0.5) >> shaped.ShapedFeedForward(0.5), shaped.equicorrelated(4, 0.2)
    single, double = (
        shaped.solve(block, V0, T=0.5, steps=20, samples=20_000, seed=seed(33), dtype=dtype, record="last")
        for dtype in (torch.float32, torch.float64)
    )
    assert single.V.dtype == torch.float32
    ones, others = (moments(paths.V[-1], paths.stopped > 0.5) for paths in (single, double))
    assert ones.keys() == others.keys() >= {"rho_mean", "rho_spread", "log_variance_mean", "log_variance_spread"}
    for name, (value, influence) in ones.items():
        error = math.hypot(standard_error(influence), standard_error(others[name][1]))
        assert abs(value - others[name][0]) <= Z * error, name
        assert name != "rho_spread" or Z * error < 0.05 * value, "5 % would not be seen"


def test_euler_leaves_the_cone_and_says_how_often():
    block, V0 = shaped.ShapedAttention(8**-0.5) >> shaped.ShapedFeedForward(8**-0.5), shaped.equicorrelated(4, 0.2)
    coarse, fine = (shaped.solve(block, V0, T=0.75, steps=n, samples=4000, seed=34, method="euler") for n in (15, 150))
    assert int(coarse.info["projections"]) > int(fine.info["projections"]) > 0
    assert torch.linalg.eigvalsh(coarse.V).min() > -1e-10
