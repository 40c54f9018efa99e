"""A finite step against explicit weights, and against the limit: the contract of every layer's law."""

import math

import pytest
import torch
from laws import EVERY, OTHERS, SHAPED

import shaped
from shaped.covariance import Point, factor, vech
from shaped.layers.base import ResidualLayer, Sizes
from shaped.nn.activations import LeakyReLU
from shaped.randomness import Stream
from stats import assert_mean, assert_same_moments, generator, random_covariance, seed

M = 3
CPU = torch.device("cpu")


def tokens(V: torch.Tensor, n: int, g: torch.Generator) -> torch.Tensor:
    """Tokens with covariance V in a uniformly random direction: normals, whitened, so that no convention of a factorisation enters."""
    Z = torch.randn(len(V), n, generator=g, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(Z @ Z.mT)
    return math.sqrt(n) * torch.linalg.cholesky(V) @ (vectors / values.sqrt() @ vectors.mT @ Z)


@pytest.mark.parametrize("name", EVERY)
def test_one_step_has_the_law_of_explicit_weights(name):
    layer, n_k = EVERY[name], 5
    n = 16 if name == "heads, ALiBi" else 12  # 8 heads
    V, g = random_covariance(M, 50), generator(51)
    explicit = torch.empty(6000, M, M, dtype=torch.float64)
    with torch.no_grad():
        for i in range(len(explicit)):
            X = layer.module(n, n_k, generator=g, dtype=torch.float64)(tokens(V, n, g))
            explicit[i] = X @ X.mT / n
    for path in ("tokens",) if layer.needs_tokens else ("tokens", "gram"):
        drawn = shaped.propagate(layer, V, n=n, n_k=n_k, d=1, samples=60_000, seed=seed(52), path=path, record="last")
        assert drawn.info["path"] == path
        assert_same_moments(vech(drawn.V[-1]), vech(explicit))


def test_tokens_start_in_a_uniformly_random_direction():
    """LayerNorm sees the direction: with a branch of weight 0 it is all that it sees."""
    V, n = torch.eye(2, dtype=torch.float64), 3
    drawn = shaped.propagate(shaped.PostLN(shaped.ShapedAttention(0.0)), V, n=n, d=1, samples=100_000, seed=seed(49), record="last")
    assert_mean(drawn.V[-1, :, 0, 1], 0.0)


def test_a_deep_network_has_the_law_of_explicit_weights():
    """The Transformer at n = 64, d = 48, end of path."""
    block, n, d = shaped.ShapedAttention(0.5) >> shaped.ShapedFeedForward(0.5), 64, 48
    V0, g = shaped.equicorrelated(M, 0.2), generator(53)
    X = torch.stack([tokens(V0, n, g) for _ in range(600)]).float()
    with torch.no_grad():
        for i in range(len(X)):
            X[i] = torch.nn.Sequential(*(block.module(n, generator=g) for _ in range(d)))(X[i])
    V = (X @ X.mT / n).double()
    explicit = shaped.Trajectory(torch.tensor([d / n], dtype=torch.float64), V[None], torch.full((600,), math.inf, dtype=torch.float64))
    drawn = shaped.propagate(block, V0, n=n, d=d, samples=6000, seed=seed(54), record="last")
    found = shaped.compare(explicit, drawn)
    for distance in (*found.ks.values(), *found.wasserstein.values()):
        assert distance.value < 1.7 * distance.band  # a Kolmogorov-Smirnov distance passes this in 1 of 30,000 cases


class Mirrored(Stream):
    """The same draws, with the sign of the logits turned."""

    def matrices(self, like, rows, columns):
        return -super().matrices(like, rows, columns)


def drift_samples(layer: ResidualLayer, V: torch.Tensor, n: int, samples: int) -> torch.Tensor:
    """Samples with mean n·E[V' - V], [sample, p].

    Given F, the mean over the values' weights is exact, E[V'] = lam² V + gamma² F Fᵀ, so only F is drawn; and logits come in pairs
    of both signs, which takes out all that is odd in them.
    """
    L = factor(V.expand(samples, M, M))
    made, same_draws = [], seed(55)
    for source in (Stream, Mirrored):
        slices = layer.branch(L, Sizes(n), source(same_draws, 0, dtype=V.dtype, device=CPU))
        inside = torch.stack([F @ F.mT for F in slices]).mean(0)
        made.append(n * ((layer.shortcut**2 - 1) * V + layer.gamma**2 * inside))
    return vech((made[0] + made[1]) / 2)


RESIDUAL = [name for name in SHAPED if isinstance(SHAPED[name], ResidualLayer)]


@pytest.mark.parametrize("name", RESIDUAL)
def test_the_drift_is_the_limits(name):
    """n·E[V' - V] → b, with a bias that halves when n doubles; a drift that is 5 % off is rejected."""
    layer, V, n = SHAPED[name], random_covariance(M, 56), 64
    assert isinstance(layer, ResidualLayer)
    b = vech(layer.drift(V))
    count = {"feed-forward": 1_000_000, "heads": 300_000, "heads, projected": 300_000, "heads, ALiBi": 200_000}.get(name, 800_000)
    once, twice, four = (drift_samples(layer, V, k * n, count).double() for k in (1, 2, 4))
    means, errors = [x.mean(0) for x in (once, twice, four)], [x.std(0) / len(x) ** 0.5 for x in (once, twice, four)]
    C = 20.0 * b.abs().max()
    for k, mean, error in zip((1, 2, 4), means, errors, strict=True):
        assert ((mean - b).abs() < 5 * error + C / (k * n)).all()
    # the bias C/n: from n to 2n it changes by C/2n, from 2n to 4n by half of that
    change, next_change = means[1] - means[0], means[2] - means[1]
    uncertain = (errors[0] ** 2 / 4 + (1.5 * errors[1]) ** 2 + errors[2] ** 2).sqrt()
    assert ((next_change - change / 2).abs() < 5 * uncertain + 0.35 * change.abs().max()).all()
    extrapolated = (2 * means[2] - means[1], (4 * errors[2] ** 2 + errors[1] ** 2).sqrt())
    assert ((extrapolated[0] - b).abs() < 5 * extrapolated[1] + 0.006 * b.abs().max()).all()
    if name == "heads, projected":
        return  # the values' Gram matrix adds noise that no pairing takes out: 5 % would need ten times the samples
    for wrong in (0.95, 1.05):
        assert not ((extrapolated[0] - wrong * b).abs() < 5 * extrapolated[1] + 0.006 * b.abs().max()).all()


@pytest.mark.parametrize(
    ("layer", "samples"),
    [
        (shaped.ShapedPerceptron(3.0, -3.0), 2_000_000),
        (shaped.ShapedAttention(0.7, 0.3) >> shaped.ShapedFeedForward(0.7, 3.0, -3.0), 500_000),
    ],
    ids=["perceptron", "transformer"],
)
def test_the_drift_of_whole_steps_is_the_limits(layer, samples):
    """The same for layers whose branch cannot be averaged by hand, from whole steps at n = 128 and 256, whose biases C/n cancel.

    Whole steps are noisy. A perceptron's drift that is 5 % off is still rejected; the Transformer's is the sum of two tested above.
    """
    V = random_covariance(M, 56)
    b = vech(layer.drift(V))
    means, errors = [], []
    for n in (128, 256):
        after = shaped.propagate(layer, V, n=n, d=1, samples=samples, seed=seed(66), record="last").V[-1]
        x = n * vech(after - V)
        means.append(x.mean(0))
        errors.append(x.std(0) / samples**0.5)
    found, error = 2 * means[1] - means[0], (4 * errors[1] ** 2 + errors[0] ** 2).sqrt()
    left = 0.01 * b.abs().max()
    assert ((found - b).abs() < 5 * error + left).all()
    if isinstance(layer, shaped.ShapedPerceptron):
        for wrong in (0.95, 1.05):
            assert not ((found - wrong * b).abs() < 5 * error + left).all()


@pytest.mark.parametrize("name", SHAPED)
def test_the_noise_is_the_limits(name):
    """n·Cov[V'] → Sigma, with a bias C/n; a Sigma that is 5 % off is rejected."""
    layer, V = SHAPED[name], random_covariance(M, 57)
    n = 256 if name == "feed-forward" else 64  # its slopes, 1 ± 4/sqrt(n), are far from 1 at small n
    Sigma = layer.Sigma(V)

    def scaled_squares(n):
        V1 = shaped.propagate(layer, V, n=n, d=1, samples=400_000, seed=seed(58), record="last").V[-1]
        x = vech(V1 - V1.mean(0))
        return n * x[:, :, None] * x[:, None, :]

    once, twice = scaled_squares(n), scaled_squares(2 * n)
    C = 25.0 * Sigma.max().item()
    assert_mean(once, Sigma, bias=C / n)
    assert_mean(twice, Sigma, bias=C / (2 * n))
    extrapolated = 2 * twice - once  # takes out the bias
    assert_mean(extrapolated, Sigma, bias=0.01 * Sigma.max().item())
    for wrong in (0.95, 1.05):
        with pytest.raises(AssertionError):
            assert_mean(extrapolated, wrong * Sigma, bias=0.01 * Sigma.max().item())


def test_slopes_of_unequal_size_approach_the_limit_only_like_the_root_of_n():
    """E[V'] of the perceptron is known, V + (K(V) - V)·e²/(a² + e²): its error is C/n where c_plus = -c_minus, else C/sqrt(n)."""
    V = shaped.equicorrelated(2, 0.2)
    for c_plus, c_minus, ratio in ((0.0, -1.0, 2**0.5), (0.5, -0.5, 2.0)):
        layer = shaped.ShapedPerceptron(c_plus, c_minus)
        wrong = []
        for n in (4096, 8192):
            at = layer.shape.at(n)
            assert isinstance(at, LeakyReLU)
            a, e = (at.positive_slope + at.negative_slope) / 2, (at.positive_slope - at.negative_slope) / 2
            share = e**2 / (a**2 + e**2)
            rate = (c_plus - c_minus) ** 2 / 4
            wrong.append(abs(n * share / rate - 1))
        assert wrong[0] / wrong[1] == pytest.approx(ratio, rel=0.02)
        n = 64
        a, e = 1 + (c_plus + c_minus) / 2 / n**0.5, (c_plus - c_minus) / 2 / n**0.5
        drawn = shaped.propagate(layer, V, n=n, d=1, samples=400_000, seed=seed(59), record="last").V[-1]
        exact = V + layer.drift(V) / ((c_plus - c_minus) ** 2 / 4) * e**2 / (a**2 + e**2)
        assert_mean(vech(drawn), vech(exact))


@pytest.mark.parametrize("name", OTHERS)
def test_layers_without_a_limit_say_why(name):
    layer = OTHERS[name]
    for ask in (layer.drift, layer.Sigma, lambda V: shaped.solve(layer, V, T=0.1, seed=0)):
        with pytest.raises(shaped.NoLimit, match=r"O\(1\)"):
            ask(torch.eye(M, dtype=torch.float64))


@pytest.mark.parametrize("name", EVERY)
def test_only_the_shaped_layers_updates_shrink_with_the_width(name):
    """What NoLimit says is so: the mean update of V is O(1) there; of a layer with a limit it is O(1/n)."""
    layer, V = EVERY[name], 2.0 * random_covariance(M, 60)
    updates = []
    for n in (64, 1024):
        after = shaped.propagate(layer, V, n=n, d=1, samples=20_000, seed=seed(61), record="last").V[-1]
        updates.append((after.mean(0) - V).abs().max().item())
    error = 5 * (layer.Sigma(V).max().item() / 1024 / 20_000) ** 0.5 if name in SHAPED else 0.0
    if name in SHAPED:
        assert updates[1] < updates[0] / 4 + error
    else:
        assert updates[1] > 0.7 * updates[0] > 0.01


def test_no_limit_names_the_offending_term():
    said = {}
    for name, layer in OTHERS.items():
        with pytest.raises(shaped.NoLimit) as caught:
            layer.limit()
        said[name] = str(caught.value)
    assert "identity=False leaves" in said["temperature and centre"]
    assert "centre=False leaves" in said["id and temperature"]
    assert "temperature=False leaves" in said["id and centre"]
    assert all(word in said["softmax attention"] for word in ("identity=False leaves", "centre=False leaves", "temperature=False leaves"))
    assert "lam² + gamma² = 1.45" in said["lam and gamma free"]
    assert "slopes 1 and 0 " in said["ReLU"]
    assert "LN(X)" in said["Pre-LN"]
    assert "length 1" in said["Post-LN"]


@pytest.mark.parametrize("name", EVERY)
def test_every_layer_survives_collapse_and_explosion(name):
    layer = EVERY[name]
    eye, ones = torch.eye(M, dtype=torch.float64), torch.ones(M, M, dtype=torch.float64)
    for V0 in (ones, 1e60 * ones, 1e60 * eye, 1e-60 * eye, 1e75 * eye):
        for n in (M + 1, 32) if getattr(layer, "heads", 1) == 1 else (32,):
            if (n % 4 and "heads" in name) or ("Post-LN" in name and n % 2):
                continue
            paths = shaped.propagate(layer, V0, n=n, d=12, samples=16, seed=seed(62))
            assert paths.V.isfinite().all()
            assert paths.rho.isfinite().all()
            assert not paths.stopped.isnan().any()


def test_attention_reads_keys_narrower_than_the_tokens():
    """n_k < m: the logits have rank n_k, drawn without Bartlett's factor."""
    layer, V = shaped.ShapedAttention(0.9, 0.3), random_covariance(5, 63)
    L = factor(V.expand(1000, 5, 5))
    A = layer.attention(None, L, Sizes(20, 2), Stream(0, 0, dtype=torch.float64, device=CPU))
    assert A.shape == (1000, 5, 5)
    assert torch.allclose(A.sum(-1), torch.ones(1000, 5, dtype=torch.float64))


def test_bartlett_is_the_root_of_a_wishart_matrix():
    g = Stream(seed(64), 0, dtype=torch.float64, device=CPU)
    for size, degrees in ((3, 7), (3, 3), (4, 2)):
        T = g.bartlett(torch.zeros(100_000, 1, 1, dtype=torch.float64), size, degrees)
        Z = g.normal(100_000, size, degrees)
        assert_same_moments(vech(T @ T.mT), vech(Z @ Z.mT))


def test_points_keep_their_factor():
    V = random_covariance(M, 65, (2,))
    point = Point(root=factor(V))
    assert torch.allclose(point.V, V)
    assert point.L is point.root
