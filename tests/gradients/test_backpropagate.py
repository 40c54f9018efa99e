"""backpropagate: the law of autograd's gradients through networks with explicit weights."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from autograd_networks import LAYERS, assert_one_law, cross_entropy, differentiate, simulate, squared_error
from torch import Tensor, nn

import shaped
from shaped import engine
from shaped.gradients import block, simulation
from shaped.gradients.products import Products, draw_normals, draw_pair, find_basis, find_root
from shaped.layers import Layer, Sizes
from shaped.randomness import Stream
from shaped.testing.stats import assert_covariance, assert_mean, assert_rejected, assert_same_moments, generator, seed

CPU = torch.device("cpu")
ATTENTION = LAYERS["heads, projected, causal"]
V0 = shaped.equicorrelated(3, 0.2)
OPTIONS: dict[str, Any] = {"n": 8, "d": 3, "outputs": 2, "loss": squared_error, "samples": 6, "seed": 0}


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_have_autograds_law(name, m):
    """Jointly with the loss and the last covariance."""
    layer, V0, loss = LAYERS[name], shaped.equicorrelated(m, 0.2), cross_entropy if m == 3 else squared_error
    explicit = differentiate(layer, V0, 16, 2, loss, 1500, generator(30))
    assert_one_law(explicit, simulate(layer, V0, 16, 2, loss, 6000, 31))


def test_independent_matrices_have_another_law():
    """The coupling of both passes is O(1/n) a layer, and does not vanish in deep networks."""
    layer = shaped.ShapedAttention(0.5, 0.5)
    explicit = differentiate(layer, V0, 8, 8, squared_error, 4000, generator(32))
    assert_one_law(explicit, simulate(layer, V0, 8, 8, squared_error, 6000, 33))
    wrong = simulate(layer, V0, 8, 8, squared_error, 6000, 33, independent=True)
    assert_rejected(lambda: assert_one_law(explicit, wrong))


def test_tokens_that_are_alike_have_autograds_law():
    """Softmax attention brings tokens together: 1 - rho is 1e-13 here, and gradients of queries and keys are as small."""
    layer, V0 = shaped.ShapedAttention(0.8).unshaped, shaped.equicorrelated(3, 1 - 1e-13)
    explicit = differentiate(layer, V0, 16, 3, squared_error, 1500, generator(34))
    assert explicit["query 0"].max() < math.log(1e-15)
    assert_one_law(explicit, simulate(layer, V0, 16, 3, squared_error, 6000, 35))


def test_fewer_features_than_tokens_have_autograds_law():
    """Five tokens of four features: what is left of each matrix is drawn in the features that a layer's tokens do not span, if any."""
    X = torch.randn(5, 3, generator=torch.Generator().manual_seed(36), dtype=torch.float64)
    layer, V0 = shaped.ShapedAttention(0.6, 0.5) >> shaped.ShapedFeedForward(0.6, 0.5, -0.5), X @ X.mT / 3
    explicit = differentiate(layer, V0, 4, 2, squared_error, 2000, generator(37))
    assert_one_law(explicit, simulate(layer, V0, 4, 2, squared_error, 8000, 38))


def draw_product(X: Tensor, D: Tensor, number: int, independent: bool = False) -> tuple[Tensor, Tensor, Products]:
    """X W, the gradient D Wᵀ, and the object that drew them."""
    stream = Stream(seed(number), 0, dtype=X.dtype, device=CPU)
    products = Products(stream, stream, independent)
    X = X.clone().requires_grad_()
    Z = products.multiply(X, "value", partial(draw_normals, columns=D.shape[-1]))
    (gradient,) = torch.autograd.grad(Z, X, D)
    return Z.detach(), gradient, products


def draw(*shape: int, number: int = 40) -> Tensor:
    return torch.randn(*shape, generator=generator(number), dtype=torch.float64)


@pytest.mark.parametrize("m", [5, 7])
def test_as_many_tokens_as_features_determine_the_matrix(m):
    X, D = draw(20, m, 5), draw(20, m, 4, number=41)
    Z, gradient, products = draw_product(X, D, 42)
    W = torch.linalg.lstsq(X, Z).solution
    assert torch.allclose(gradient, D @ W.mT, rtol=1e-9, atol=1e-9)
    assert torch.allclose(products.squares["value"], (X.mT @ D).square().sum((-2, -1)))


@pytest.mark.parametrize("case", ["generic", "equal tokens", "almost equal tokens", "a token of zeros", "collapsed"])
def test_the_way_back_has_the_matrix_of_the_way_there(case):
    """(D Wᵀ) Xᵀ = D (X W)ᵀ, whatever W is."""
    X, D = draw(20, 3, 9), draw(20, 3, 4, number=43)
    if case == "equal tokens":
        X[::2, 1] = X[::2, 0]
    elif case == "almost equal tokens":
        X[:, 1] = X[:, 0] + 1e-12 * X[:, 1]
    elif case == "a token of zeros":
        X[:, 0] = 0.0
    elif case == "collapsed":
        X = X[:, :1] + 1e-14 * X
    F, O = find_basis(X)
    assert torch.allclose(F @ O, X, rtol=0.0, atol=1e-13)
    assert torch.allclose(O @ O.mT, torch.eye(3, dtype=torch.float64).expand(20, 3, 3), atol=1e-9)
    Z, gradient, _ = draw_product(X, D, 44)
    assert torch.allclose(gradient @ X.mT, D @ Z.mT, rtol=0.0, atol=1e-11)
    if case == "equal tokens":
        assert torch.allclose(Z[::2, 0], Z[::2, 1], rtol=0.0, atol=1e-13)
    wrong = draw_product(X, D, 44, independent=True)[1]
    assert not torch.allclose(wrong @ X.mT, D @ Z.mT, rtol=0.1, atol=0.1)


def test_the_rest_of_the_matrix_is_fresh():
    """Across X the gradient's rows have covariance D Dᵀ in every direction, and they do not depend on the product."""
    count, X, D = 60_000, draw(2, 4), draw(2, 3, number=45)
    across = torch.linalg.qr(X.T, mode="complete").Q[:, 2:]
    Z, gradient, _ = draw_product(X.expand(count, 2, 4), D.expand(count, 2, 3), 46)
    rows = (gradient @ across).flatten(1)
    covariance = torch.kron(D @ D.T, torch.eye(2, dtype=torch.float64))
    assert_covariance(rows, covariance)
    assert_rejected(lambda: assert_covariance(rows, 1.05 * covariance))
    assert_mean((rows[:, :, None] * Z.flatten(1)[:, None]).flatten(1), 0.0)


@pytest.mark.parametrize("outputs", [1, 5, 9])
def test_gradients_of_any_rank_have_a_root(outputs):
    """Eight tokens of very different gradients; one has none."""
    D = draw(2000, 8, outputs, number=50) * 10.0 ** -torch.arange(8.0, dtype=torch.float64)[:, None]
    D[:, 3] = 0.0
    K = D @ D.mT
    C = find_root(K)
    size = D.norm(dim=-1, keepdim=True)
    assert ((C @ C.mT - K).abs() <= 1e-12 * size * size.mT).all()


def test_a_root_does_not_depend_on_rounding():
    """Of rank 1, and rounded in many ways: with some of them Cholesky's algorithm fails. Another root would be another draw of the seed."""
    D = draw(1, 3, 1, number=51)
    noise = draw(500, 3, 3, number=52)
    K = (D @ D.mT) * (1.0 + 2e-16 * (noise + noise.mT))
    failed = torch.linalg.cholesky_ex(K).info > 0
    assert 0 < failed.sum() < len(K)
    expected = torch.cat([D * D[:, :1].sign(), D.new_zeros(1, 3, 2)], -1)
    assert ((find_root(K) - expected).abs() <= 1e-6 * D.norm()).all()


def test_queries_and_keys_have_the_inner_products_of_normals():
    """Two heads of width 8, and of width 3, which is less than two tokens need."""
    stream, F = Stream(seed(49), 0, dtype=torch.float64, device=CPU), torch.zeros(20_000, 2, 2, dtype=torch.float64)
    for width in (8, 3):
        normals = (stream.normal(20_000, 2, 2 * width) for _ in range(2))
        drawn, expected = (
            torch.cat(
                [
                    (one.unflatten(-1, (2, -1)).transpose(1, 2) @ two.unflatten(-1, (2, -1)).permute(0, 2, 3, 1)).flatten(1)
                    for one, two in pairs
                ],
                1,
            )
            for query, key in (draw_pair(stream, F, 2, width), normals)
            for pairs in [((query, key), (query, query), (key, key))]
        )
        assert_same_moments(drawn, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_that_are_run_again_change_no_bit(dtype):
    start = V0.to(dtype).expand(4, 3, 3)
    how = (LAYERS["GPT-2, biases"] >> ATTENTION, Sizes(16), 7, 2, squared_error, start, engine.Bounds(None, None), False)
    whole, *others = (block.run_block(block.Job(*how, segment=segment, seed=0, block=0)) for segment in (7, 3, 1))
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(whole, other, strict=True))


def test_blocks_may_run_anywhere(monkeypatch):
    monkeypatch.setattr(simulation, "MOST", {"cpu": 2, "cuda": 2})
    here = shaped.backpropagate(ATTENTION, V0, **OPTIONS)
    with ThreadPoolExecutor(1) as executor:
        there = shaped.backpropagate(ATTENTION, V0, **OPTIONS, executor=executor)
    assert torch.equal(here.tokens, there.tokens)
    assert torch.equal(here.V, there.V)
    assert all(torch.equal(here.weights[name], there.weights[name]) for name in here.weights)
    assert len(here.loss.unique()) == 6
    assert list(here.weights) == ["query", "key", "value", "output"]
    assert torch.allclose(here.per_entry("query"), here.weights["query"] / 64)
    assert repr(here) == (
        "Gradients(3 layers, 6 samples, weights query, key, value, output, 0 stopped, n=8, d=3, outputs=2, independent=False, seed=0)"
    )
    with pytest.raises(ValueError, match=r"name must be one of 'query', .*, got 'first'"):
        here.per_entry("first")


def test_memory_is_bounded():
    """By fewer networks in a block, and where one is too large, by fewer layers at a time."""
    assert simulation.plan(1e3, 10, CPU) == (simulation.MOST["cpu"], 10)
    assert simulation.plan(1e6, 100, CPU) == (10, 100)
    assert simulation.plan(2.0**28, 100, CPU) == (1, 4)
    assert simulation.plan(2.0**31, 100, CPU) == (1, 1)
    entries, kept = simulation.probe(ATTENTION, Sizes(64), V0[None])
    assert entries == {"query": 4096, "key": 4096, "value": 4096, "output": 4096}
    assert 4 < kept / (3 * 64 * 8) < 12


def test_networks_of_width_one_have_gradients():
    layer = shaped.ShapedAttention(0.5)
    found = shaped.backpropagate(layer, [[1.0]], n=1, d=2, outputs=1, loss=squared_error, samples=4, seed=0)
    assert found.tokens.isfinite().all()


def test_a_network_that_leaves_the_range_has_no_gradients():
    options = OPTIONS | {"samples": 200, "d": 8, "upper": 12.0}
    gradients = shaped.backpropagate(shaped.ShapedAttention(0.9, 0.2), V0, **options)
    stopped = gradients.stopped.isfinite()
    assert 0 < stopped.sum() < 200
    assert (gradients.stopped[stopped] <= 1.0).all()
    for values in (gradients.tokens, *gradients.weights.values(), gradients.loss[None]):
        assert torch.equal(values.isnan().all(0), stopped)
        assert values[:, ~stopped].isfinite().all()
    assert torch.equal(torch.linalg.eigvalsh(gradients.V)[:, -1] > 12.0, stopped)


def finite_error(outputs: Tensor) -> Tensor:
    assert outputs.isfinite().all()
    return squared_error(outputs)


def test_the_loss_sees_no_network_that_left_the_float_range():
    huge = shaped.ResidualBlock(shaped.FeedForwardBranch(4, shaped.Weights(1e9), shaped.Weights(1e9)))
    options = OPTIONS | {"d": 24, "loss": finite_error}
    gradients = shaped.backpropagate(huge, V0, **options)
    assert (gradients.stopped < 1.0).all()
    assert gradients.V.isfinite().all()


def test_chains_name_the_matrices_that_are_not_unique():
    gradients = shaped.backpropagate(shaped.ShapedPerceptron() >> ATTENTION >> ATTENTION, V0, **OPTIONS)
    assert list(gradients.weights)[:3] == ["first", "1.branch.query", "1.branch.key"]
    assert gradients.tokens.shape == (4, 6)


class Linear(nn.Module):
    """A module whose matrix is used in a way that is given."""

    def __init__(self, use: Any, weight: Tensor):
        super().__init__()
        self.use, self.weight = use, nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


@dataclass(frozen=True)
class Made(shaped.ShapedPerceptron):
    """A layer of a user, whose module is not one of this package."""

    use: Any = None
    scale: float = 1.0

    def module(self, n: int, n_k: int | None = None, **draw: Any) -> nn.Module:
        weight = torch.randn(n, n, **draw)
        return Linear(self.use, weight if self.scale == 1.0 else self.scale * weight)


def test_layers_of_users_need_nothing_more():
    own: Layer = Made(use=lambda x, W: x @ W / 4.0)
    explicit = differentiate(own, V0, 16, 2, squared_error, 1500, generator(47))
    assert_one_law(explicit, simulate(own, V0, 16, 2, squared_error, 6000, 48))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outputs": 0}, "outputs must be at least 1, got 0"),
        ({"d": 1.5}, "d must be a whole number, got 1.5"),
        ({"n": 2}, "n must be at least 3, the rank of V0"),
        ({"independent": 1}, "independent must be True or False, got 1"),
        ({"loss": 3.0}, "loss must be a function of the outputs"),
        ({"loss": lambda outputs: outputs.square().mean()}, r"one number for each network, \[6\] for outputs \(6, 3, 2\), got shape \(\)"),
        ({"loss": lambda outputs: None}, "loss must return one number for each network, .* got None"),
        ({"loss": lambda outputs: squared_error(outputs.detach())}, "loss must be differentiable"),
        ({"loss": lambda outputs: squared_error(outputs - outputs.mean(0))}, "loss must keep networks apart, .* mixes the 6"),
        ({"loss": lambda outputs: squared_error(outputs.flip(0))}, "loss must keep networks apart"),
        ({"loss": lambda outputs: squared_error(outputs) / 0.0}, "loss must be finite, got inf"),
        ({"loss": lambda outputs: squared_error(0.0 * outputs + 1.0).sqrt()}, "loss must have a finite gradient, .*, got nan"),
        ({"loss": lambda outputs: None, "executor": ThreadPoolExecutor()}, "loss must be a function of a module"),
        ({"layer": 3}, "layer must be a layer"),
        ({"layer": shaped.ShapedAttention(0.5, heads=3)}, "heads must divide the width n = 8"),
        ({"layer": Made(use=lambda x, W: x @ W @ W)}, "layer must use each matrix once, got Made"),
        ({"layer": Made(use=lambda x, W: x @ W.mT)}, "layer must use its matrices as x @ W and in no other way, got Made"),
        ({"layer": Made(use=lambda x, W: x.mT @ W)}, r"layer must multiply weight by tokens \[batch, m, 8\], got Made"),
        ({"layer": Made(use=lambda x, W: (x @ W)[..., :2])}, "layer must return tokens of the shape it got"),
        ({"layer": Made(use=lambda x, W: x @ W, scale=0.5)}, "layer must draw its weights as matrices of torch.randn"),
    ],
)
def test_errors_name_the_argument(options, message):
    options = OPTIONS | options
    with pytest.raises(ValueError, match=message):
        shaped.backpropagate(options.pop("layer", ATTENTION), V0, **options)
