"""What every layer with a limit must satisfy. A new layer is one more line in LAYERS."""

import math

import pytest
import torch

import shaped
from shaped import testing
from shaped.covariance import Point, vech
from shaped.nn.activations.relu import absolute_kernel
from shaped.randomness import GeneratorNormals
from shaped.testing.limit import step_moments
from shaped.testing.stats import assert_mean, generator, random_covariance

M = 3
BIAS = torch.tensor([[0.0, 1.0, -1.0], [0.5, 0.0, float("-inf")], [0.3, -0.2, 0.1]], dtype=torch.float64)
LAYERS = {
    "attention": shaped.ShapedAttention(0.8, 0.4),
    "attention, gamma 1": shaped.ShapedAttention(1.0, 0.5),
    "causal": shaped.ShapedAttention(0.8, 0.4, mask="causal"),
    "biased": shaped.ShapedAttention(0.8, 0.4, mask=BIAS),
    "heads, projected": shaped.ShapedAttention(0.8, 0.4, heads=4, project=True),
    "heads, ALiBi": shaped.ShapedAttention(0.8, 0.4, heads=2, project=True, mask=shaped.alibi(M, 2)),
    "QK-norm": shaped.ShapedAttention(0.8, 0.4, qk_norm=True),
    "RoPE": shaped.ShapedAttention(0.8, 0.4, rope=(0.7,)),
    "RoPE, QK-norm, causal": shaped.ShapedAttention(0.8, 0.4, mask="causal", qk_norm=True, rope=(0.7,)),
    "feed-forward": shaped.ShapedFeedForward(0.8, 0.5, -3.5),
    "perceptron": shaped.ShapedPerceptron(0.0, -3.0),
    "transformer": shaped.ShapedAttention(0.8, 0.4) >> shaped.ShapedFeedForward(0.7, 0.0, -3.0),
    "two masks": shaped.ShapedAttention(0.5) >> shaped.ShapedAttention(0.5, mask="causal") >> shaped.ShapedPerceptron(),
}
POSITIONS = ("RoPE", "RoPE, QK-norm, causal")
SYMMETRIC = [name for name in LAYERS if name not in ("causal", "biased", "heads, ALiBi", "two masks", *POSITIONS)]


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]


def test_noise_has_covariance_sigma(layer):
    testing.check_noise(layer, M)


def test_noise_is_symmetric_and_reproducible(layer):
    testing.check_symmetry(layer, M)


def test_sigma_is_positive_semidefinite(layer):
    testing.check_Sigma(layer, range(2, 7) if layer not in (LAYERS["biased"], LAYERS["heads, ALiBi"]) else [M])


def test_batches_are_single_matrices(layer):
    testing.check_batches(layer, M)


@pytest.mark.parametrize("name", SYMMETRIC)
@pytest.mark.parametrize("m", [2, 5, 9])
def test_permuting_the_tokens_permutes_the_limit(name, m):
    testing.check_permutation(LAYERS[name], m)


def test_a_small_step_has_the_limits_moments(layer):
    testing.check_solver_step(layer, M)


@pytest.mark.parametrize("name", ["attention", "biased", "heads, projected"])
def test_the_logits_step_rejects_a_drift_five_percent_off(name):
    V, term = random_covariance(M, 11) / 2, LAYERS[name].terms[1]
    drift, _ = step_moments([term], V)
    assert_mean(drift, vech(term.drift(V)), bias=2e-3)
    with pytest.raises(AssertionError):
        assert_mean(drift, 1.05 * vech(term.drift(V)), bias=2e-3)


def test_the_relu_step_follows_its_flow():
    """No randomness here: the step and its derivative at h = 0 can be compared to all digits."""
    V, term = random_covariance(M, 11), LAYERS["perceptron"].terms[1]
    h, normals = 1e-6, GeneratorNormals(generator(0), V)
    ahead = term.move(Point(matrix=V), h, normals).V
    assert torch.allclose((ahead - V) / h, term.drift(V), rtol=1e-5, atol=1e-9)


def test_slopes_that_grow_with_the_root_of_the_step_would_be_of_order_one_half():
    """Why the ReLU's step is a relaxation: the arc-cosine map with slopes 1 + c·sqrt(h), which suggests itself, halves its
    error only every other halving of the step. The flow has no noise, so both orders can be read off."""
    c_plus, c_minus = 0.0, -1.0
    V0, rate = shaped.equicorrelated(2, 0.2), (c_plus - c_minus) ** 2 / 4

    def rho_at_one(share, steps):
        V = V0
        for _ in range(steps):
            V = torch.lerp(V, absolute_kernel(V), share(1.0 / steps))
        return V[0, 1].item()

    def by_slopes(h):
        mean, half = 1 + (c_plus + c_minus) * h**0.5 / 2, (c_plus - c_minus) * h**0.5 / 2
        return half**2 / (mean**2 + half**2)

    def by_relaxation(h):
        return -math.expm1(-rate * h)

    exact = rho_at_one(by_relaxation, 2**14)
    for share, order in ((by_slopes, 0.5), (by_relaxation, 1.0)):
        errors = [abs(rho_at_one(share, steps) - exact) for steps in (2**8, 2**10)]
        assert math.log(errors[0] / errors[1], 4) == pytest.approx(order, abs=0.06)
    moved = shaped.ShapedPerceptron(c_plus, c_minus).terms[1].move(Point(matrix=V0), 1 / 64, GeneratorNormals(generator(0), V0)).V
    assert torch.equal(moved, torch.lerp(V0, absolute_kernel(V0), by_relaxation(1 / 64)))


def test_drift_and_sigma_of_a_chain_are_the_sums():
    testing.check_chain(LAYERS["biased"], LAYERS["feed-forward"], M)


def test_terms_of_one_kind_are_collected():
    """A deep block costs the solver no more than its different terms."""
    block = LAYERS["attention"] >> LAYERS["feed-forward"] >> LAYERS["attention"] >> LAYERS["perceptron"]
    assert len(block.terms) == 3
    assert len((LAYERS["causal"] >> LAYERS["attention"]).terms) == 3
    V = random_covariance(M, 14)
    total = sum(layer.drift(V) for layer in block.layers)
    assert torch.allclose(block.drift(V), torch.as_tensor(total), rtol=1e-13, atol=1e-15)


def test_chains_are_associative_and_show_their_layers():
    a, b, c = (LAYERS[name] for name in ("attention", "feed-forward", "perceptron"))
    assert ((a >> b) >> c).layers == (a >> (b >> c)).layers == (a, b, c)
    assert repr(b >> c) == f"{b!r} >> {c!r}"
