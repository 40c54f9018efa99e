"""Shaped attention with QK-norm and with RoPE: what the logits see of the tokens."""

import math
from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch
from test_theorems import bias_for, close, mask_for

import shaped
from shaped import testing
from shaped.covariance import factor
from shaped.layers.base import Chain, Sizes
from shaped.layers.logits import LogitPerturbation
from shaped.layers.rope import check_rope, lag_modes, lag_similarity
from shaped.nn.functional import rotate, rotation_of_places
from shaped.randomness import Stream
from shaped.testing.law import draw_tokens
from shaped.testing.stats import generator, random_covariance, seed

ROPES = {"none": None, "base": 50.0, "frequencies": (1.3, 0.4, 0.02)}


def oracle_limit(layer, V, biases):
    """Drift and Sigma, a head at a time."""
    kernel = oracle.correlation(V) if layer.qk_norm else V
    drifts, Sigmas = [], []
    for bias in biases:
        P = oracle.resting(bias.numpy())
        S1, S2 = oracle.logit_moments(kernel, P, layer.rope)
        drifts.append(oracle.attention_drift(V, P, S1, S2, layer.gamma, layer.tau0))
        Sigmas.append(oracle.attention_sigma(V, P, S1, layer.gamma, layer.tau0, layer.heads, layer.project))
    return np.mean(drifts, 0), np.mean(Sigmas, 0)


@pytest.mark.parametrize("m", [2, 3, 5])
@pytest.mark.parametrize("kind", ["full", "causal", "random", "a bias for each head"])
@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize(("qk_norm", "rope"), [(True, "none"), (False, "base"), (True, "base"), (True, "frequencies")])
def test_drift_and_sigma_are_the_theorems_sums(m, kind, project, qk_norm, rope):
    V = random_covariance(m, m)
    V[0] *= 3.0
    V[:, 0] *= 3.0  # lengths that differ
    heads = 4 if kind.startswith("a bias") or project else 1
    mask, biases = (shaped.alibi(m, heads),) * 2 if kind.startswith("a bias") else (mask_for(kind, m), [bias_for(kind, m)])
    layer = shaped.ShapedAttention(0.6, 0.7, heads=heads, project=project, mask=mask, qk_norm=qk_norm, rope=ROPES[rope])
    drift, Sigma = oracle_limit(layer, V.numpy(), biases)
    close(layer.drift(V), drift)
    close(layer.Sigma(V), Sigma)


def test_networks_with_rope_have_the_limits_drift_and_noise():
    """Without QK-norm the limit needs only the logits' second moments, which are right for every n_k: narrow keys, which are cheap, do."""
    layer = shaped.ShapedAttention(0.8, 0.4, rope=ROPES["frequencies"])
    testing.check_drift_of_branch(layer, 3, n_k=6)
    testing.check_Sigma_of_steps(layer, 3, n_k=6)


@pytest.mark.parametrize("rope", ROPES)
def test_a_token_of_length_zero_has_no_logits(rope):
    """Its correlations are 0 there, with itself too. The other tokens see it as a key with logit 0."""
    m, V = 4, random_covariance(4, 1)
    V[2] = V[:, 2] = 0.0
    layer = shaped.ShapedAttention(0.6, 0.7, mask=bias_for("random", m), qk_norm=True, rope=ROPES[rope])
    drift, Sigma = oracle_limit(layer, V.numpy(), [bias_for("random", m)])
    close(layer.drift(V), drift)
    close(layer.Sigma(V), Sigma)
    L = factor(V.expand(8, m, m))
    for n_k in (6, 2):  # fewer features than tokens too
        widths = layer if isinstance(ROPES[rope], float | None) else replace(layer, rope=ROPES[rope][: n_k // 2])
        A = widths.attention(None, L, Sizes(12, n_k), Stream(0, 0, dtype=torch.float64, device=torch.device("cpu")))
        assert torch.allclose(A[:, 2], torch.eye(m, dtype=torch.float64)[2], rtol=0, atol=1e-15)
        assert (A[:, 0] != A[:1, 0]).any()
    paths = shaped.solve(layer, V, T=0.1, steps=10, samples=64, seed=0, record="last")
    assert paths.V.isfinite().all()
    assert paths.V[-1, :, 2, 2].max() < 1e-200


def test_the_drift_keeps_its_digits_when_tokens_collapse():
    """Tokens that differ by a share of 1e-4 have a Q of its fourth power: a sum of numbers near 1, here in extended precision."""
    X = 1.0 + 1e-4 * torch.randn(3, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    V = X @ X.mT / 5
    found = LogitPerturbation(None, 1.0, 1.0, qk_norm=True).mean_change(V).squared.item()
    wide = V.numpy().astype(np.longdouble)
    rho = wide / np.sqrt(np.outer(np.diag(wide), np.diag(wide)))
    centred = rho - rho.mean(0) - rho.mean(0)[:, None] + rho.mean()
    assert found == pytest.approx(float((wide * centred).mean()), rel=0.02)
    assert 0.0 < found < 1e-14


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (True, "rope must be a base, such as 10000.0, or an array of frequencies, got True"),
        ("llama", "rope must be a base, such as 10000.0, or an array of frequencies, got 'llama'"),
        (0.5, r"rope must lie in \[1, 1e\+12\], got 0.5"),
        ([], r"rope must be a base or a list of frequencies, got shape \(0,\)"),
        ([[1.0]], r"rope must be a base or a list of frequencies, got shape \(1, 1\)"),
        ([1.0, float("nan")], r"rope must hold finite frequencies of at most 1e\+12, got nan"),
    ],
)
def test_ropes_that_are_refused(rope, words):
    with pytest.raises(ValueError, match=words):
        check_rope(rope)


def test_widths_that_rope_cannot_have():
    V0 = shaped.equicorrelated(3, 0.2)
    for rope, n_k, words in ((100.0, 5, "n_k must be even with rope, .* got 5"), ((1.0, 0.1), 6, "n_k must be 4, two features for each")):
        layer = shaped.ShapedAttention(0.5, rope=rope)
        with pytest.raises(ValueError, match=words):
            shaped.propagate(layer, V0, n=8, n_k=n_k, d=1, samples=1, seed=0)
        with pytest.raises(ValueError, match=words):
            layer.module(8, n_k)


def test_ropes_are_kept_as_numbers():
    for given in (torch.tensor([1.0, 0.5]), np.array([1.0, 0.5]), [1, 0.5]):
        assert check_rope(given) == (1.0, 0.5)
    assert check_rope(check_rope(100)) == 100.0
    layer = shaped.ShapedAttention(0.5, qk_norm=True, rope=(1.0, 0.5))
    assert repr(layer) == "ShapedAttention(gamma=0.5, qk_norm=True, rope=<2 frequencies>)"
    assert repr(shaped.ShapedAttention(0.5, rope=10000.0)) == "ShapedAttention(gamma=0.5, rope=10000.0)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_long_token_that_a_mask_hides_changes_nothing(dtype, qk_norm):
    """The first token attends to itself alone, and nobody to it; the others move as without it, however long it is."""
    mask = torch.zeros(4, 4, dtype=torch.float64)
    mask[0, 1:] = mask[1:, 0] = -torch.inf
    V = shaped.equicorrelated(4, 0.2).to(dtype)
    others = shaped.ShapedAttention(0.5, 0.5, qk_norm=qk_norm).drift(V[1:, 1:].contiguous())
    for length in (1.0, 1e2, 1e4):
        scale = torch.tensor([length, 1.0, 1.0, 1.0], dtype=dtype)
        found = shaped.ShapedAttention(0.5, 0.5, mask=mask, qk_norm=qk_norm).drift(V * scale * scale[:, None])
        assert torch.allclose(found[1:, 1:], others, rtol=0, atol=20 * torch.finfo(dtype).eps)


def test_tables_that_are_kept_do_not_depend_on_the_mode_of_their_first_call():
    """Tensors of inference mode, or of a default device without numbers, would break every later call that meets them."""
    layer, V0 = shaped.ShapedAttention(0.5, rope=(1.0, 0.375)), shaped.equicorrelated(3, 0.2)  # frequencies of no other test
    with torch.inference_mode():
        layer.drift(V0)
        layer.noise(V0, torch.Generator().manual_seed(0))
        shaped.propagate(layer, V0, n=8, n_k=4, d=1, samples=2, seed=0)
    layer.module(8, 4).double()(torch.ones(3, 8, dtype=torch.float64)).sum().backward()
    leaf = V0.clone().requires_grad_()
    layer.drift(leaf).sum().backward()
    layer.noise(leaf, torch.Generator().manual_seed(0)).sum().backward()
    with torch.device("meta"):
        tables = *rotation_of_places(3, (1.0, 0.3125)), lag_modes((1.0, 0.3125), 3), lag_similarity((1.0, 0.3125), 3)
    assert {table.device.type for table in tables} == {"cpu"}


def test_terms_of_different_logits_stay_apart():
    layers = [shaped.ShapedAttention(0.5, qk_norm=qk_norm, rope=rope) for qk_norm in (False, True) for rope in (None, 100.0, (1.0, 0.1))]
    assert len(Chain(*layers, *layers).terms) == 7


def test_rope_turns_pairs_of_features():
    """Llama's convention: feature i and feature i + n_k/2, by the token's place times the frequency."""
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 3.0]], dtype=torch.float64)
    theta = shaped.rope_frequencies(4, 100.0)
    assert theta == pytest.approx((1.0, 0.1))
    cos, sin = math.cos, math.sin
    expected = [[1.0, 0, 0, 0], [cos(1), 2 * cos(0.1), sin(1), 2 * sin(0.1)], [0, -3 * sin(0.2), 0, 3 * cos(0.2)]]
    assert torch.allclose(rotate(x, *rotation_of_places(3, theta)), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-15)


def test_the_similarity_of_lags():
    """Of a base: (Ci(s) - Ci(s/base))/log(base) at large lags, where the oracle's series ends; the modes give it back."""
    found = lag_similarity(10_000.0, 1000)
    for s in (0, 1, 7, 20):
        assert found[s].item() == pytest.approx(oracle.lag_similarity(10_000.0, s), abs=1e-8 if s == 20 else 1e-12)
    u = (np.arange(1_000_000) + 0.5) / 1_000_000
    assert found[999].item() == pytest.approx(np.cos(999 * 10_000.0**-u).mean(), abs=1e-8)
    modes = lag_modes(10_000.0, 40)
    assert len(modes) < 40
    products = torch.einsum("rab,rcd->abcd", modes, modes)
    for a, b, c, d in ((0, 39, 39, 0), (3, 5, 7, 1), (8, 8, 2, 2)):
        assert products[a, b, c, d].item() == pytest.approx(found[abs((a - b) - (c - d))].item(), abs=1e-13)


def test_with_qk_norm_no_path_explodes():
    """Long tokens and a low temperature. Without QK-norm every path of the SDE explodes, and networks grow faster the wider they are."""
    V0 = 100.0 * torch.eye(4, dtype=torch.float64)
    without, with_norm = (shaped.ShapedAttention(0.9, 0.1, qk_norm=qk_norm) for qk_norm in (False, True))
    assert shaped.solve(without, V0, T=1.0, samples=64, seed=seed(70), record="last").stopped_share == 1.0
    paths = shaped.solve(with_norm, V0, T=1.0, samples=64, seed=seed(71), record="last")
    assert paths.stopped_share == 0.0
    assert paths.info["steps"] == math.ceil(81 * 1.5 / 0.2)  # rate·h is bounded, whatever V is
    shares = {
        (layer, n): shaped.propagate(layer, V0, n=n, d=n, samples=256, seed=seed(72), record="last", upper=1e12).stopped_share
        for layer in (without, with_norm)
        for n in (64, 256)
    }
    assert shares[without, 64] + 0.05 < shares[without, 256]
    assert shares[with_norm, 64] == shares[with_norm, 256] == 0.0


def test_the_drift_grows_no_faster_than_the_covariance():
    """tr b <= 3 m·rate·tr V for every V: why no solution explodes (docs/method.md). Scaling V scales drift and noise."""
    m, V = 4, random_covariance(4, 3, (200,))
    sizes = torch.logspace(-6, 6, m, dtype=torch.float64)
    for rope in (None, 100.0):
        for mask in (None, "causal", bias_for("random", m)):
            layer = shaped.ShapedAttention(0.9, 0.1, mask=mask, qk_norm=True, rope=rope)
            rate = 0.9**2 / 0.1**2
            for W in (V, V * sizes[:, None] * sizes):
                trace = layer.drift(W).diagonal(dim1=-2, dim2=-1).sum(-1)
                assert (trace < 3 * m * rate * W.diagonal(dim1=-2, dim2=-1).sum(-1)).all()
            assert torch.allclose(layer.drift(100.0 * V), 100.0 * layer.drift(V), rtol=0, atol=1e-9)
            assert torch.allclose(layer.Sigma(100.0 * V), 1e4 * layer.Sigma(V), rtol=0, atol=1e-7)


def test_deep_networks_have_the_law_of_explicit_weights():
    """n = 16, d = 8, end of path."""
    layer, n, d, count = shaped.ShapedAttention(0.7, 0.4, heads=2, project=True, mask="causal", qk_norm=True, rope=100.0), 16, 8, 400
    V0, g = shaped.equicorrelated(3, 0.2), generator(73)
    V = torch.empty(count, 3, 3, dtype=torch.float64)
    with torch.no_grad():
        for i in range(count):
            X = draw_tokens(V0, n, g)
            for _ in range(d):
                X = layer.module(n, generator=g, dtype=torch.float64)(X)
            V[i] = X @ X.mT / n
    explicit = shaped.Trajectory(torch.tensor([d / n], dtype=torch.float64), V[None], torch.full((count,), math.inf, dtype=torch.float64))
    drawn = shaped.propagate(layer, V0, n=n, d=d, samples=10_000, seed=seed(74), record="last")
    found = shaped.compare(explicit, drawn, pair=(0, 1))
    for distance in (*found.ks.values(), *found.wasserstein.values()):
        assert distance.value < 1.7 * distance.band  # a Kolmogorov-Smirnov distance passes this in 1 of 30,000 cases


def test_wide_networks_have_the_sdes_law():
    """End of path, QK-norm, at a temperature at which the logits matter."""
    layer, V0 = shaped.ShapedAttention(0.7, 0.3, mask="causal", qk_norm=True), shaped.equicorrelated(3, 0.2, variance=4.0)
    limit = shaped.solve(layer, V0, T=0.5, samples=4000, seed=seed(75), record="last")
    networks = shaped.propagate(layer, V0, n=100, d=50, samples=4000, seed=seed(76), record="last")
    found = shaped.compare(limit, networks, pair=(0, 1))
    for distance in found.ks.values():
        assert distance.value < 1.7 * distance.band
    other = shaped.propagate(replace(layer, qk_norm=False), V0, n=100, d=50, samples=4000, seed=seed(76), record="last")
    assert max(distance.value / distance.band for distance in shaped.compare(limit, other, pair=(0, 1)).ks.values()) > 3.0
