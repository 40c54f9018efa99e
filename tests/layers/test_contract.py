"""What every layer with a limit must satisfy. A new layer is one more line in LAYERS."""

import pytest
import torch

import shaped
from shaped.covariance import Point, vech
from shaped.randomness import GeneratorNormals
from stats import assert_covariance, assert_mean, generator, random_covariance

M = 3
BIAS = torch.tensor([[0.0, 1.0, -1.0], [0.5, 0.0, float("-inf")], [0.3, -0.2, 0.1]], dtype=torch.float64)
LAYERS = {
    "attention": shaped.ShapedAttention(0.8, 0.7),
    "attention, gamma 1": shaped.ShapedAttention(1.0, 1.3),
    "causal": shaped.ShapedAttention(0.8, 0.7, mask="causal"),
    "biased": shaped.ShapedAttention(0.8, 0.7, mask=BIAS),
    "heads, projected": shaped.ShapedAttention(0.8, 0.7, heads=4, project=True),
    "feed-forward": shaped.ShapedFeedForward(0.8, 0.5, -1.5),
    "perceptron": shaped.ShapedPerceptron(0.0, -2.0),
    "transformer": shaped.ShapedAttention(0.5, 0.8) >> shaped.ShapedFeedForward(0.7, 0.0, -1.0),
    "two masks": shaped.ShapedAttention(0.5) >> shaped.ShapedAttention(0.5, mask="causal") >> shaped.ShapedPerceptron(),
}
SYMMETRIC = [name for name in LAYERS if name not in ("causal", "biased", "two masks")]


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]


def test_noise_has_covariance_sigma(layer):
    V, g = random_covariance(M, generator(5)), generator(6)
    draws = [vech(layer.noise(V.expand(125_000, M, M), g)) for _ in range(8)]
    samples = torch.cat(draws)
    assert len(samples) == 1_000_000
    assert_mean(samples, 0.0)
    assert_covariance(samples, layer.Sigma(V))


def test_noise_is_symmetric_and_reproducible(layer):
    V = random_covariance(M, generator(7), (5,))
    one, two = (layer.noise(V, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(one, one.mT)


def test_sigma_is_positive_semidefinite(layer):
    for m in range(2, 7) if layer is not LAYERS["biased"] else [M]:
        eigenvalues = torch.linalg.eigvalsh(layer.Sigma(random_covariance(m, generator(m), (8,))))
        assert (eigenvalues[:, 0] >= -1e-12 * eigenvalues[:, -1]).all()


def test_batches_are_single_matrices(layer):
    V = random_covariance(M, generator(8), (2, 3))
    for of in (layer.drift, layer.Sigma):
        whole = of(V)
        assert whole.shape[:2] == (2, 3)
        assert torch.allclose(whole[1, 2], of(V[1, 2]), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", SYMMETRIC)
@pytest.mark.parametrize("m", [2, 5, 9])
def test_permuting_the_tokens_permutes_the_limit(name, m):
    layer, g = LAYERS[name], generator(9)
    V, order = random_covariance(m, g), torch.randperm(m, generator=g)
    shuffled = V[order][:, order]
    assert torch.allclose(layer.drift(shuffled), layer.drift(V)[order][:, order], rtol=1e-12, atol=1e-14)
    rows, columns = torch.triu_indices(m, m)
    label = torch.empty(m, m, dtype=torch.long)
    label[rows, columns] = label[columns, rows] = torch.arange(len(rows))
    same = label[order[rows], order[columns]]
    assert torch.allclose(layer.Sigma(shuffled), layer.Sigma(V)[same][:, same], rtol=1e-12, atol=1e-14)


def test_a_small_step_has_the_limits_moments(layer):
    """E[V'] = V + h b and Cov[V'] = h Sigma, up to O(h²): what weak order 1 rests on."""
    V, b, Sigma = (x(random_covariance(M, generator(11))) for x in (lambda V: V, layer.drift, layer.Sigma))
    for h in (0.04, 0.02):
        points = Point(matrix=V.expand(400_000, M, M))
        normals = GeneratorNormals(generator(12))
        for term in layer.terms:
            points = term.move(points, h, normals)
        moved = (vech(points.V) - vech(V)) / h
        assert_mean(moved, vech(b), bias=8.0 * h * Sigma.max().item())
        assert_covariance(moved * h**0.5, Sigma, bias=12.0 * h * Sigma.max().item())


def test_drift_and_sigma_of_a_chain_are_the_sums():
    a, b = LAYERS["biased"], LAYERS["feed-forward"]
    V = random_covariance(M, generator(13), (4,))
    for chain in (a >> b, b >> a):
        assert torch.allclose(chain.drift(V), a.drift(V) + b.drift(V), rtol=1e-13, atol=1e-15)
        assert torch.allclose(chain.Sigma(V), a.Sigma(V) + b.Sigma(V), rtol=1e-13, atol=1e-15)


def test_terms_of_one_kind_are_collected():
    """A deep block costs the solver no more than its different terms."""
    block = LAYERS["attention"] >> LAYERS["feed-forward"] >> LAYERS["attention"] >> LAYERS["perceptron"]
    assert len(block.terms) == 3
    assert len((LAYERS["causal"] >> LAYERS["attention"]).terms) == 3
    V = random_covariance(M, generator(14))
    total = sum(layer.drift(V) for layer in block.layers)
    assert torch.allclose(block.drift(V), torch.as_tensor(total), rtol=1e-13, atol=1e-15)


def test_chains_are_associative_and_show_their_layers():
    a, b, c = (LAYERS[name] for name in ("attention", "feed-forward", "perceptron"))
    assert ((a >> b) >> c).layers == (a >> (b >> c)).layers == (a, b, c)
    assert repr(b >> c) == f"{b!r} >> {c!r}"
