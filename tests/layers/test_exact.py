"""Single steps computed again by hand, from the same random numbers, to 1e-10.

A statistical test notices an error of 5 % in a mean. These tests notice any change of a constant, of an index or of the order of the draws.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch

import shaped
from shaped.covariance import Point, factor, make_batch_innermost
from shaped.engine import Bounds
from shaped.finite import TokenSteps
from shaped.layers.base import Sizes
from shaped.layers.feedforward import ActivationDrift, activation_gram
from shaped.layers.logits import LogitPerturbation
from shaped.layers.terms import WeightNoise
from shaped.limit import ConeSteps, EulerSteps, HalvedSteps, default_steps
from shaped.nn.activations.relu import LeakyReLU, ReLURelaxation
from shaped.randomness import Stream
from shaped.testing.stats import random_covariance

BIAS = torch.tensor([[0.0, 1.0, -1.0], [0.5, 0.0, -math.inf], [0.3, -0.2, 0.1]], dtype=torch.float64)
CAUSAL = torch.zeros(3, 3, dtype=torch.float64).masked_fill(~torch.ones(3, 3).tril().bool(), -math.inf)
MASKS = {"full": (None, torch.zeros(3, 3, dtype=torch.float64)), "causal": ("causal", CAUSAL), "biased": (BIAS, BIAS)}


def twins(number):
    """Two streams of the same numbers: one for the layer, one for the test."""
    return (Stream(number, 0, kind="twin", dtype=torch.float64, device=torch.device("cpu")) for _ in range(2))


def close(ours, theirs):
    theirs = torch.as_tensor(theirs)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-10 * theirs.abs().max()


def softmax(rows):
    powers = np.exp(rows - rows.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


# The steps of the solver


@pytest.mark.parametrize(("m", "scale", "h", "parts"), [(3, 0.7, 0.05, 1), (3, 0.7, 0.17, 3), (12, 1.3, 0.05, 2)])
def test_the_weights_step(m, scale, h, parts):
    """V' = L W Lᵀ, W = T Tᵀ/nu; on T's diagonal a + b g, where (a + b g)² has the mean k = nu - i and the variance 2k."""
    V, (stream, same) = random_covariance(m, 1, (4,)), twins(2)
    found = WeightNoise(scale).move(Point(matrix=V), h, stream).V
    p = scale * h / parts
    nu = (1 + 1.5 * p) / p
    k = nu - np.arange(m)
    b = np.sqrt(k - np.sqrt(k**2 - k))
    a = np.sqrt(k - b**2)
    L = np.linalg.cholesky(V.numpy())
    for _ in range(parts):
        T = same.triangles(V, m).numpy().copy()
        i = np.arange(m)
        T[:, i, i] = a + b * T[:, i, i]
        L = L @ T / math.sqrt(nu)
    close(found, L @ L.transpose(0, 2, 1))


def relu_drift(rate: float) -> ActivationDrift:
    return ActivationDrift(ReLURelaxation(rate))


def test_the_longest_steps():
    assert WeightNoise(2.0).longest(4) == 0.05 / 2
    assert WeightNoise(2.0).longest(19) == 0.5 / 20 / 2
    assert WeightNoise(2.0).halved().longest(4) == 0.05 / 4
    assert WeightNoise(2.0).halved().halved().plus(WeightNoise(1.0)) == WeightNoise(3.0, 0.25)
    assert WeightNoise(0.0).longest(4) == relu_drift(0.0).longest(4) == LogitPerturbation(None, 1.0, 1.0).longest(4) == math.inf
    assert relu_drift(4.0).longest(4) == 0.1 / 4
    assert WeightNoise(1.0).plus(relu_drift(1.0)) is relu_drift(1.0).plus(WeightNoise(1.0)) is None


def logit_step(V, bias, rate, variance, h, G):
    """One stride of one path: M V Mᵀ + h (rate - variance) E[E V Eᵀ], M = I + sqrt(h variance) E + h rate/2 P∘S2; by the oracle's sums."""
    P, m = oracle.resting(bias.numpy()), len(V)
    S1, S2 = oracle.logit_moments(V, P)
    L = np.linalg.cholesky(V)
    N = L @ G @ L.T
    E = P * (N - (P * N).sum(1, keepdims=True))
    M = np.eye(m) + math.sqrt(h * variance) * E + h * rate / 2 * P * S2
    return M @ V @ M.T + h * (rate - variance) * mean_square(V, P, S1)


def mean_square(V, P, S1):
    """E[E V Eᵀ]."""
    return np.einsum("av,ck,vk,avck->ac", P, P, V, S1)


def speed_and_growth(V, bias, noisiness):
    """The largest relative change of a token's mean variance, in size and upwards, for a rate of 1.

    The size is larger where the noise limits a part: its variance, at most `noisiness` times the first part, to 0.03, the mean to 0.2.
    """
    P = oracle.resting(bias.numpy())
    S1, S2 = oracle.logit_moments(V, P)
    first, second = np.diag(mean_square(V, P, S1)) / np.diag(V), np.diag(P * S2 @ V) / np.diag(V)
    speed = np.maximum(first + abs(second), noisiness * first * 0.2 / 0.03)
    return speed.max(), max(0.0, (first + second).max())


@pytest.mark.parametrize("mask", MASKS)
def test_a_stride_of_the_logits(mask):
    V, (stream, same) = random_covariance(3, 3, (2,)), twins(4)
    given, bias = MASKS[mask]
    found = LogitPerturbation(given, 0.9, 0.4).move(Point(matrix=V), 0.01, stream).V
    draws = same.square(V).numpy()
    close(found, np.stack([logit_step(one, bias, 0.9, 0.4, 0.01, G) for one, G in zip(V.numpy(), draws, strict=True)]))


@pytest.mark.parametrize("variance", [0.01, 0.4])
@pytest.mark.parametrize(("excess", "many"), [(0.99, False), (1.01, True), (12.3, True), (22.6, True)])
@pytest.mark.parametrize("mask", MASKS)
def test_a_fast_path_takes_the_logits_step_in_parts(mask, excess, many, variance):
    """By this excess over what is stepped at once: an eighth of a part's mean change, or all of what the noise may do in a part."""
    given, bias = MASKS[mask]
    rate, h = 0.9, 0.01
    noisiness = 4 * variance / rate
    slow, V = random_covariance(3, 5) / 20, random_covariance(3, 12)
    V = V * math.sqrt(excess * 0.2 / (8 * rate * h * speed_and_growth(V.numpy(), bias, noisiness / 8)[0]))  # the speed is quadratic in V
    stream, same = twins(7)
    found = LogitPerturbation(given, rate, variance).move(Point(matrix=torch.stack([slow, V])), h, stream).V
    draws = same.square(torch.stack([slow, V])).numpy()
    close(found[0], logit_step(slow.numpy(), bias, rate, variance, h, draws[0]))
    if not many:
        close(found[1], logit_step(V.numpy(), bias, rate, variance, h, draws[1]))
        return
    left, here, parts = h, V.numpy(), 2
    while parts > 1:
        speed, growth = speed_and_growth(here, bias, noisiness)
        parts = max(1, math.ceil(left * speed * rate / 0.2))
        part = left / parts
        here = logit_step(here, bias, rate, variance, part * (1 + 1.4 * rate * part * growth), same.fork().square(V[None])[0].numpy())
        left -= part
    close(found[1], here)


def test_attention_without_a_rate_does_not_move():
    point = Point(matrix=random_covariance(3, 8, (2,)))
    assert LogitPerturbation(None, 0.0, 0.0).move(point, 0.1, next(twins(9))) is point


@pytest.mark.parametrize("mask", MASKS)
def test_noise_from_the_same_normals(mask):
    V, (given, bias) = random_covariance(3, 10), MASKS[mask]
    L, P = np.linalg.cholesky(V.numpy()), oracle.resting(bias.numpy())
    for term, by_hand in (
        (WeightNoise(0.7), lambda N: math.sqrt(0.7 / 2) * N),
        (LogitPerturbation(given, 0.9, 0.4), lambda N: math.sqrt(0.4) * (P * (N - (P * N).sum(1, keepdims=True))) @ V.numpy()),
    ):
        stream, same = twins(11)
        half = by_hand(L @ same.square(V).numpy() @ L.T)
        close(term.noise(Point(matrix=V), stream), half + half.T)


def test_an_euler_step():
    V, (stream, same), layer = shaped.equicorrelated(3, 0.3).expand(2, 3, 3), twins(12), shaped.ShapedAttention(0.6, 0.7, mask=BIAS)
    state, outside = EulerSteps(layer.terms, 0.01).step(Point(matrix=V), stream)
    noise = sum(term.noise(Point(matrix=V), same) for term in layer.terms)
    close(state.V, V + 0.01 * layer.drift(V) + 0.1 * noise)
    assert not outside.any()


def test_an_euler_step_that_leaves_the_cone_is_projected():
    V, (stream, same) = shaped.equicorrelated(2, 0.95).expand(9, 2, 2).clone(), twins(13)
    V[8] = math.nan
    term = WeightNoise(1.0)
    state, outside = EulerSteps((term,), 1.0).step(Point(matrix=V), stream)
    moved = V + term.noise(Point(matrix=V), same)
    values, vectors = np.linalg.eigh(moved[:8].numpy())
    assert outside.tolist() == [*(values[:, 0] < 0), False]
    assert ((values[:, 0] < 0) & (values[:, 1] > 0)).any()
    close(state.V[:8], np.einsum("bij,bj,bkj->bik", vectors, values.clip(min=0), vectors))
    assert state.V[8].isnan().all()


def test_pairs_of_a_whole_and_two_half_steps():
    """Without noise both are known. A path that passes a bound half way stays there."""
    V = torch.stack([shaped.equicorrelated(2, rho) for rho in (0.1, 0.1, 0.5, 0.5)])
    term, (stream, _) = relu_drift(2.0), twins(14)

    def step(h, start):
        return term.move(Point(matrix=start), h, stream).V

    for upper, ends in ((None, step(0.05, step(0.05, V[1::2]))), (1.5, None)):
        pairs = HalvedSteps(ConeSteps((term,), 0.1), ConeSteps((term,), 0.05), Bounds(upper, None))
        found, _ = pairs.step(Point(matrix=V), stream)
        close(found.V[::2], step(0.1, V[::2]))
        if ends is None:
            ends = torch.stack([step(0.05, step(0.05, V[1])), step(0.05, V[3])])  # the largest eigenvalues: 1.1 and more, 1.5 and more
        close(found.V[1::2], ends)


@pytest.mark.parametrize("m", [3, 9])
def test_the_relus_drift_with_a_token_of_length_zero(m):
    V = random_covariance(m, 15)
    V[0] = V[:, 0] = 0.0
    b = torch.zeros(m, m, dtype=torch.float64)
    b[1:, 1:] = torch.from_numpy(oracle.relu_drift(V[1:, 1:].numpy(), 0.3, -1.2))
    layer = shaped.ShapedPerceptron(0.3, -1.2)
    assert (layer.drift(V) - b).abs().max() < 1e-14
    assert torch.equal(layer.drift(torch.ones(m, m, dtype=torch.float64)), torch.zeros(m, m, dtype=torch.float64))
    assert layer.noise(V[1:, 1:], torch.Generator()).shape == (m - 1, m - 1)


# The steps of a finite network


def attention_matrix(L, bias, heads_keys, tau, identity, centre, stream, like):
    """A = I + softmax(Y/tau + B) - softmax(B) for logits L T G Lᵀ, all paths."""
    T = stream.bartlett(like, L.shape[-1], heads_keys).numpy()
    G = stream.matrices(like, T.shape[-1], L.shape[-1]).numpy()
    Y = L @ T @ G @ L.transpose(0, 2, 1) / tau
    return identity * np.eye(L.shape[-1]) + softmax(Y + bias.numpy()) - centre * softmax(bias.numpy())


def gram_step(L, F, lam, gamma, n, stream, like):
    """(lam L + gamma F G/sqrt(n)) (…)ᵀ + gamma²/n F T Tᵀ Fᵀ."""
    m, k = F.shape[-2:]
    R = lam * L + gamma / math.sqrt(n) * F @ stream.matrices(like, k, m).numpy()
    V = R @ R.transpose(0, 2, 1)
    if n > m:
        across = F @ stream.bartlett(like, k, n - m).numpy()
        V = V + gamma**2 / n * across @ across.transpose(0, 2, 1)
    return V


@pytest.mark.parametrize(("n", "n_k"), [(10, None), (10, 2), (3, None), (4, 7)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("switch", ["", "identity", "centre", "temperature", "lam"])
def test_attention_on_the_covariance(mask, n, n_k, switch):
    given, bias = MASKS[mask]
    changed: dict[str, Any] = {} if not switch else {"lam": 0.5} if switch == "lam" else {switch: False}
    layer = shaped.ShapedAttention(0.6, 0.7, mask=given, **changed)
    V, (stream, same) = random_covariance(3, 16, (4,)), twins(17)
    found = layer.advance_gram(Point(matrix=V), Sizes(n, n_k), stream).V
    like, keys = factor(V), n_k or n
    tau = 0.7 * math.sqrt(keys if switch == "temperature" else n * keys)
    A = attention_matrix(like.numpy(), bias, keys, tau, switch != "identity", switch != "centre", same, like)
    lam = 0.5 if switch == "lam" else 0.8
    close(found, gram_step(like.numpy(), A @ like.numpy(), lam, 0.6, n, same, like))


def test_heads_with_projection_on_the_covariance():
    V, (stream, same) = random_covariance(3, 18, (4,)), twins(19)
    layer, n, mask = shaped.ShapedAttention(0.6, 0.7, heads=2, project=True, mask=torch.stack([BIAS, CAUSAL])), 10, (BIAS, CAUSAL)
    found = layer.advance_gram(Point(matrix=V), Sizes(n), stream).V
    like = factor(V)
    L = like.numpy()
    heads = [attention_matrix(L, bias, 5, 0.7 * math.sqrt(50), 1, 1, same, like) @ L for bias in mask]
    roots = [F @ same.bartlett(like, 3, 5).numpy() for F in heads]
    F = np.linalg.cholesky(sum(root @ root.transpose(0, 2, 1) for root in roots) / n)
    close(found, gram_step(L, F, 0.8, 0.6, n, same, like))


def test_heads_on_the_tokens():
    """Each head has half of the features."""
    g = torch.Generator().manual_seed(20)
    X, (stream, same) = torch.randn(4, 3, 10, generator=g, dtype=torch.float64), twins(21)
    found = shaped.ShapedAttention(0.6, 0.7, heads=2, mask=torch.stack([BIAS, CAUSAL])).advance_tokens(X, Sizes(10, 3), stream)
    like = factor(X @ X.mT / 10)
    L = like.numpy()
    heads = [attention_matrix(L, bias, 3, 0.7 * math.sqrt(30), 1, 1, same, like) @ L for bias in (BIAS, CAUSAL)]
    values = np.concatenate([F @ same.matrices(X, 3, 5).numpy() for F in heads], -1)
    close(found, 0.8 * X.numpy() + 0.6 * values)


def activation(x, c_plus, c_minus, n):
    """sqrt(c) sigma(x) with slopes 1 + c/sqrt(n), c = 2/(s_+² + s_-²)."""
    positive, negative = 1 + c_plus / math.sqrt(n), 1 + c_minus / math.sqrt(n)
    return math.sqrt(2 / (positive**2 + negative**2)) * (positive * x.clip(min=0) + negative * x.clip(max=0))


@pytest.mark.parametrize("n", [10, 4000])  # 4000: the paths are taken a few at a time
@pytest.mark.parametrize("c_plus", [0.0, 0.4])
def test_feedforward_on_the_covariance(n, c_plus):
    V = random_covariance(3, 22, (7,))
    like = factor(V)
    L = like.numpy()
    for layer, c_minus in (
        (shaped.ShapedFeedForward(0.6, c_plus, -1.2), -1.2),
        (shaped.ShapedPerceptron(c_plus, -1.2), -1.2),
        (shaped.ReLUFeedForward(0.6, 0.3, lam=0.5), None),
    ):
        stream, same = twins(23)
        found = layer.advance_gram(Point(matrix=V), Sizes(n), stream).V
        before = L @ same.normal(7, 3, n).numpy()
        hidden = (
            activation(before, c_plus, c_minus, n) if c_minus else math.sqrt(2 / 1.09) * (before.clip(min=0) + 0.3 * before.clip(max=0))
        )
        K = hidden @ hidden.transpose(0, 2, 1) / n
        if isinstance(layer, shaped.ShapedPerceptron):
            close(found, K)
        else:
            close(found, gram_step(L, np.linalg.cholesky(K), 0.8 if c_minus else 0.5, 0.6, n, same, like))


def test_perceptron_and_layer_norms_on_the_tokens():
    g = torch.Generator().manual_seed(24)
    X = torch.randn(4, 3, 10, generator=g, dtype=torch.float64)

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)

    stream, same = twins(25)
    L = np.linalg.cholesky((X @ X.mT / 10).numpy())
    found = shaped.ShapedPerceptron(0.4, -1.2).advance_tokens(X, Sizes(10), stream)
    close(found, activation(L @ same.matrices(X, 3, 10).numpy(), 0.4, -1.2, 10))
    inner = shaped.ShapedAttention(0.6, lam=0.9)
    stream, same = twins(26)
    found = shaped.PreLN(inner).advance_tokens(X, Sizes(10), stream)
    close(found, 0.9 * X + 0.6 * inner.update(torch.from_numpy(norm(X.numpy())), Sizes(10), same))
    stream, same = twins(27)
    close(shaped.PostLN(inner).advance_tokens(X, Sizes(10), stream), norm(inner.advance_tokens(X, Sizes(10), same).numpy()))


# What users leave out


def test_defaults():
    """A default that changes silently changes every result."""
    assert dataclasses.astuple(shaped.ShapedAttention(0.5)) == (0.5, 1.0, 1, False, None, None, True, True, True, False, None)
    assert dataclasses.astuple(shaped.ShapedFeedForward(0.5)) == (0.5, 0.0, -1.0, None, None)
    assert dataclasses.astuple(shaped.ShapedPerceptron()) == (0.0, -1.0, None)
    assert dataclasses.astuple(shaped.ReLUFeedForward(0.5)) == (0.5, 0.0, None)
    assert dataclasses.astuple(WeightNoise(0.5)) == (0.5, 1.0)
    assert Sizes(10).keys(3) == 3
    assert Sizes(10, 7).keys(3) == 7


def test_default_steps():
    """At most 0.01 long, and as short as the terms want, down to a sixteenth of that."""
    layer = shaped.ShapedPerceptron(0.0, 0.0)  # noise of scale 1, no drift
    for m, T, steps in ((4, 0.01, 1), (4, 0.0100001, 2), (4, 0.02, 2), (99, 0.05, 10), (999, 0.05, 80), (4, 1e-12, 1)):
        assert default_steps(layer, m, T) == steps


def test_hidden_features_do_not_depend_on_the_layout_of_the_batch():
    """Few tokens have the batch innermost in memory."""
    L = torch.linalg.cholesky(torch.stack([shaped.equicorrelated(4, rho) for rho in (0.1, 0.3, 0.5)]))
    one, other = twins(15)
    apart = activation_gram(L, 8, LeakyReLU(0.5, 1.0), one)
    innermost = activation_gram(make_batch_innermost(L), 8, LeakyReLU(0.5, 1.0), other)
    assert innermost.stride(0) == 1
    close(innermost, apart)


def test_blocks_of_tokens_are_sized_by_all_their_features():
    assert TokenSteps(shaped.ShapedPerceptron(), Sizes(10)).count_entries(3) == 30


def test_heads_with_fewer_features_than_tokens_multiply_in_the_cheaper_order():
    """Six tokens, heads of two features: the same numbers as in the order of the formula."""
    layer, sizes = shaped.ShapedAttention(0.5, 0.3, heads=2, project=True), Sizes(4, 2)
    L = factor(random_covariance(6, 6, (2,)))

    def start() -> Stream:
        return Stream(3, 0, dtype=torch.float64, device=torch.device("cpu"))

    stream = start()
    T = stream.bartlett(L, 6, 2)
    logits = L @ T @ (0.7 * stream.matrices(L, 2, 6)) @ L.mT
    assert torch.allclose(layer.plain_logits(L, 2, 0.7, start()), logits, rtol=1e-12, atol=1e-12)
    stream = start()
    heads = [layer.attention(None, L, sizes, stream) for _ in range(2)]
    roots = [A @ L @ stream.bartlett(L, 6, 2) for A in heads]
    (F,) = layer.branch(L, sizes, start())
    assert torch.allclose(F @ F.mT, sum((root @ root.mT for root in roots), torch.zeros(())) / 4, rtol=1e-9, atol=1e-9)
