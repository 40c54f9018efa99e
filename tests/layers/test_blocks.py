"""Blocks of Transformers in use: each law against explicit weights, and each of its formulas."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from explicit import ALIBI, BLOCKS, LN, ONE_TOKEN, RMS, V0, M, N, attention, draw_explicit, draw_law, feedforward, find_distance
from torch import Tensor, nn
from torch.nn.functional import silu

import shaped
from shaped import AttentionBranch, FeedForwardBranch, Norm, Normalise, ResidualBlock, Weights, rope_frequencies, testing
from shaped.covariance import equicorrelated, factor
from shaped.layers.attention_branch import normalise_heads, rotate_in_place
from shaped.layers.base import Sizes
from shaped.nn.activations.functions import FUNCTIONS
from shaped.nn.functional import rotate, rotation_of_places
from shaped.nn.random_blocks import RandomSelfAttention
from shaped.randomness import Stream
from shaped.testing.stats import KS_AT_Z, assert_rejected, assert_same_moments, generator, random_covariance, seed

NETWORKS = 8_000
# more for blocks whose options have small effects
MORE = {"attention, biases": 20_000, "window, soft cap": 20_000, "SwiGLU, norm and post": 30_000}


@cache
def explicit(name: str) -> Tensor:
    return draw_explicit(BLOCKS[name], MORE.get(name, NETWORKS), 51)


def path_of(layer: shaped.Layer) -> str:
    return "tokens" if layer.needs_tokens else "gram"


@pytest.mark.parametrize("name", BLOCKS)
def test_one_step_has_the_law_of_explicit_weights(name):
    """Covariance and entropy: means, covariances, third moments."""
    layer = BLOCKS[name]
    for path in {"tokens", path_of(layer)}:
        assert_same_moments(draw_law(layer, path, 2 * NETWORKS, 52), explicit(name))


def change(name: str, **options: Any) -> shaped.Layer:
    """The block with other options: its own where it has them, else those of its first branch."""
    layer = BLOCKS[name]
    assert isinstance(layer, ResidualBlock)
    assert isinstance(layer.branches, tuple)
    branch = layer.branches[0]
    outside: dict[str, Any] = {key: value for key, value in options.items() if hasattr(layer, key)}
    inside: dict[str, Any] = {key: value for key, value in options.items() if key not in outside}
    return replace(layer, branches=(replace(branch, **inside), *layer.branches[1:]), **outside)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("attention, biases", {"query": Weights(0.315, 1.2)}),
        ("attention, biases", {"query": Weights(0.3, 1.26)}),
        ("attention, biases", {"value": Weights(0.315, 1.2)}),
        ("attention, biases", {"value": Weights(0.3, 1.26)}),
        ("attention, biases", {"output": Weights(0.315, 1.4)}),
        ("attention, biases", {"output": Weights(0.3, 1.47)}),
        ("narrow heads", {"scale": 1.05 * 2**-0.5}),
        ("grouped, rotary", {"norm": Norm("rms", eps=1.0, gain=1.575)}),
        ("grouped, rotary", {"rope": None}),
        ("grouped, rotary", {"key_heads": 4}),
        ("grouped, rotary", {"key_heads": 1}),
        ("multi-query, rotary in part, biases", {"rope": None}),
        ("ALiBi, grouped", {"mask": ALIBI[[0, 0, 1, 1]]}),
        ("window, soft cap", {"window": 3}),
        ("window, soft cap", {"softcap": 1.575}),
        ("window, soft cap", {"scale": 0.084}),
        ("grouped, a mask for each head", {"mask": ONE_TOKEN[[0, 2, 1, 3]]}),
        ("QK-norm of a head", {"qk_norm": Norm("rms", eps=5.25, gain=1.5)}),
        ("QK-norm of a head", {"qk_norm": Norm("rms", eps=5.0, gain=1.575)}),
        ("QK-norm of all heads", {"qk_norm_over": "head"}),
        ("shaped", {"gamma1": 0.945}),
        ("shaped", {"gamma2": 0.735}),
        ("SwiGLU, norm and post", {"norm": Norm("rms", eps=1.05, gain=1.5)}),
        ("SwiGLU, norm and post", {"post": Norm("rms", eps=3.15, gain=1.5)}),
        ("SwiGLU, norm and post", {"activation": "gelu"}),
        ("SwiGLU, norm and post", {"inner": Weights(0.315)}),
        ("SwiGLU, norm and post", {"hidden": 25}),
        ("Post-LN", {"after": Norm("layer", eps=1.05, gain=1.5)}),
        ("Post-LN", {"outer": Weights(0.315, 0.5)}),
        ("DyT", {"norm": Norm("dyt", gain=1.4, alpha=0.84)}),
        ("DyT", {"lam": 1.05}),
        ("parallel", {"gamma": 0.735}),
    ],
    ids=str,
)
def test_a_law_that_is_five_percent_off_is_rejected(name, options):
    wrong = change(name, **options)
    drawn = draw_law(wrong, path_of(wrong), MORE.get(name, 2 * NETWORKS), 53)
    assert_rejected(lambda: assert_same_moments(drawn, explicit(name)))


def test_a_weight_of_attention_that_is_five_percent_off_is_rejected():
    """Before the output's bias, unlike the weight of the block."""
    layer = BLOCKS["shaped, weighed"]
    assert isinstance(layer, ResidualBlock)
    assert isinstance(layer.branches, tuple)
    (branch,) = layer.branches
    assert isinstance(branch, AttentionBranch)
    light, outside = replace(branch, gamma=0.84), replace(branch, gamma=1.0)
    for wrong in (replace(layer, branches=(light,)), replace(layer, branches=(outside,), gamma=0.8)):
        drawn = draw_law(wrong, path_of(wrong), 2 * NETWORKS, 53)
        assert_rejected(lambda drawn=drawn: assert_same_moments(drawn, explicit("shaped, weighed")))


def test_a_deep_network_has_the_law_of_explicit_weights():
    """Llama's block, and GPT-2's with biases, 4 blocks deep: Kolmogorov-Smirnov distances at the end."""
    small = {name: Weights(0.2) for name in ("query", "key", "value", "output")}
    llama = ResidualBlock(attention(weights=small, key_heads=2, mask="causal", rope=100.0), norm=RMS) >> ResidualBlock(
        feedforward(Weights(0.2), Weights(0.2), activation="silu", gated=True), norm=RMS
    )
    gpt2 = ResidualBlock(attention(weights=dict.fromkeys(small, Weights(0.2, 0.1)), mask="causal"), norm=LN) >> ResidualBlock(
        feedforward(Weights(0.2, 0.1), Weights(0.2, 0.1), activation="gelu_tanh"), norm=LN
    )
    for layer in (llama, gpt2):
        one, other = draw_explicit(layer, 1500, 54, d=4), draw_law(layer, path_of(layer), 6000, 55, d=4)
        allowed = KS_AT_Z * (1 / len(one) + 1 / len(other)) ** 0.5
        assert find_distance(one, other) < allowed
        _, feed_forward = layer.layers
        assert isinstance(feed_forward, ResidualBlock)
        wrong = replace(feed_forward, gamma=1.2)
        assert find_distance(one, draw_law(layer.layers[0] >> wrong, path_of(layer), 6000, 55, d=4)) > allowed


@pytest.mark.parametrize("name", ["grouped, rotary", "SwiGLU, norm and post"])
def test_drawing_in_parts_keeps_the_law(name, monkeypatch):
    whole = draw_law(BLOCKS[name], "gram", 20_000, 56)
    monkeypatch.setattr("shaped.layers.branches.count_at_once", lambda device: 48)  # 16 of 24 hidden features
    monkeypatch.setattr("shaped.layers.attention_branch.count_at_once", lambda device: 8)  # one group of heads
    assert_same_moments(draw_law(BLOCKS[name], "gram", 500, 57), whole)


def test_the_modules_draw_their_own_weights():
    layer = BLOCKS["parallel"]
    x = torch.randn(M, N, generator=generator(58), dtype=torch.float64)
    same = [layer.module(N, generator=torch.Generator().manual_seed(59), dtype=torch.float64)(x) for _ in range(2)]
    assert torch.equal(*same)
    for branch in (feedforward(), attention()):
        testing.check_module(ResidualBlock(branch, norm=RMS, lam=0.5), networks=500, samples=5_000)


def test_norms_are_pytorchs():
    X = 2.0 * torch.randn(4, M, N, generator=generator(60), dtype=torch.float64) + 0.5
    weight = torch.full((N,), 1.5, dtype=torch.float64)
    assert torch.allclose(LN.apply(X), nn.functional.layer_norm(X, (N,), weight, eps=1.0), rtol=1e-13)
    assert torch.allclose(RMS.apply(X), nn.functional.rms_norm(X, (N,), weight, eps=1.0), rtol=1e-13)
    assert torch.allclose(Norm("dyt", gain=3.0, alpha=0.2).apply(X), 3.0 * torch.tanh(0.2 * X), rtol=1e-13)
    assert torch.allclose(RMS.rescale(shaped.gram(X)), shaped.gram(RMS.apply(X)), rtol=1e-13)
    whole = (Normalise(LN) >> Normalise(RMS)).module(N, dtype=torch.float64)(X)
    assert torch.allclose(whole, RMS.apply(LN.apply(X)), rtol=1e-13)
    assert (Norm("layer").eps, Norm("rms").eps, Norm("dyt").alpha) == (1e-5, 1e-5, 0.5)


def test_rotation_turns_pairs_by_the_place_times_the_frequency():
    assert rope_frequencies(4, 100.0) == pytest.approx((1.0, 0.1))
    assert rope_frequencies(8) == pytest.approx((1.0, 0.1, 0.01, 0.001))
    for frequencies in ((1.0, 0.3), (0.7, 0.2, 0.1)):
        x = torch.randn(2, 5, M, 4, 6, generator=generator(61), dtype=torch.float64)  # the last features stay
        pairs = len(frequencies)
        order = [*sum(zip(range(pairs), range(pairs, 2 * pairs), strict=True), ()), *range(2 * pairs, 6)]
        complex_numbers = RandomSelfAttention.rotate(x.transpose(2, 3)[..., order], frequencies)
        cos, sin = (part[:, None] for part in rotation_of_places(M, frequencies))
        assert torch.allclose(rotate(x, cos, sin)[..., order], complex_numbers.transpose(2, 3), rtol=1e-13)
        assert torch.allclose(rotate(x, cos, sin), rotate_in_place(x, cos, sin), rtol=1e-13)


def test_the_norm_of_all_heads_is_over_all_their_features():
    x = torch.randn(2, 5, M, 4, 6, generator=generator(62), dtype=torch.float64)
    expected = RMS.apply(x.permute(0, 2, 1, 3, 4).reshape(2, M, -1)).reshape(2, M, 5, 4, 6).permute(0, 2, 1, 3, 4)
    assert torch.equal(normalise_heads(x, RMS, "all"), expected)
    assert torch.equal(normalise_heads(x, RMS, "head"), RMS.apply(x))


def test_activations():
    x = torch.linspace(-3.0, 3.0, 13, dtype=torch.float64)
    inside = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    expected = {
        "relu": x.clamp(min=0.0),
        "gelu": x * (1 + torch.erf(x / 2**0.5)) / 2,
        "gelu_tanh": x * (1 + torch.tanh(inside)) / 2,
        "silu": x / (1 + torch.exp(-x)),
        "tanh": torch.tanh(x),
        "relu2": x.clamp(min=0.0) ** 2,
    }
    assert expected.keys() == FUNCTIONS.keys()
    for name, function in FUNCTIONS.items():
        assert torch.allclose(function(x), expected[name], rtol=1e-13, atol=1e-15)


def test_the_entropy_of_even_attention_is_the_logarithm_of_what_is_seen():
    even = {name: Weights(0.0) for name in ("query", "key", "value", "output")}
    for mask, window, seen in ((None, None, [3, 3, 3]), ("causal", None, [1, 2, 3]), ("causal", 2, [1, 2, 2])):
        drawn = draw_law(ResidualBlock(attention(weights=even, mask=mask, window=window)), "gram", 2, 63)
        assert torch.allclose(drawn[:, -1], torch.tensor(seen, dtype=torch.float64).log().mean())
    watched: dict[str, Tensor] = {}
    stream = Stream(0, 0, dtype=torch.float64, device=torch.device("cpu"))
    ResidualBlock(feedforward()).advance_tokens(torch.zeros(2, M, N, dtype=torch.float64), Sizes(N), stream, watched)
    assert watched == {}


@pytest.mark.parametrize("name", ["grouped, rotary", "SwiGLU, norm and post", "Post-LN"])
def test_blocks_survive_collapse_and_explosion(name):
    testing.check_survival(BLOCKS[name], M)


def test_single_precision_and_as_many_features_as_tokens():
    for path in ("tokens", "gram"):
        layer = BLOCKS["grouped, rotary"]
        exact = shaped.propagate(layer, V0, n=M, d=2, samples=4000, seed=64, path=path, record="last")
        rough = shaped.propagate(layer, V0, n=M, d=2, samples=4000, seed=65, path=path, record="last", dtype=torch.float32)
        assert exact.info["path"] == path
        assert_same_moments(exact.V[-1].flatten(1), rough.V[-1].double().flatten(1))


def test_blocks_have_no_limit_and_say_why():
    for layer in (BLOCKS["parallel"], Normalise(RMS)):
        with pytest.raises(shaped.NoLimit, match=r"O\(1\)"):
            layer.drift(random_covariance(M, 66))


PLAIN = Weights(0.1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Weights(-1.0), r"std must lie in \[0, 1e\+18\], got -1.0"),
        (lambda: Weights(1.0, float("nan")), "bias must lie in"),
        (lambda: Norm("batch"), "kind must be one of 'layer', 'rms', 'dyt', got 'batch'"),
        (lambda: Norm("rms", alpha=0.5), "alpha must be left out for 'rms', which has none, got 0.5"),
        (lambda: Norm("dyt", eps=0.1), "eps must be left out for 'dyt', which has none, got 0.1"),
        (lambda: Normalise("rms"), "norm must be a norm, such as Norm"),  # pyright: ignore[reportArgumentType]
        (lambda: attention(key_heads=3), "key_heads must divide the number of heads, 4, got 3"),
        (lambda: attention(window=2), "window must be None unless mask is 'causal', got 2"),
        (lambda: attention(mask="future"), "mask must be None, 'causal' or a bias"),
        (lambda: attention(softcap=0.0), "softcap must be positive"),
        (lambda: attention(qk_norm_over="all"), "qk_norm_over must be left out without qk_norm, got 'all'"),
        (lambda: attention(qk_norm=RMS, qk_norm_over="heads"), "qk_norm_over must be 'head' or 'all', got 'heads'"),
        (lambda: attention(rope=(1.0, 1.0, 1.0)), "head_width must be at least 6, two features for each of rope's 3 frequencies, got 4"),
        (lambda: attention(rope=True), "rope must be a base, such as 10000.0, or an array of frequencies, got True"),
        (lambda: attention(head_width=3, rope=10.0), "head_width must be even with rope, .*, got 3"),
        (lambda: rope_frequencies(3), "width must be even, since features are rotated in pairs, got 3"),
        (lambda: AttentionBranch(4, 4, 0.1, PLAIN, PLAIN, PLAIN), "query must be weights, such as"),  # pyright: ignore[reportArgumentType]
        (lambda: FeedForwardBranch(0, PLAIN, PLAIN), "hidden must be at least 1, got 0"),
        (lambda: feedforward(activation="swish"), "activation must be one of 'relu', .*, got 'swish'"),
        (lambda: ResidualBlock(()), r"branches must be a branch, .*, got \(\)"),
        (lambda: ResidualBlock(feedforward(), norm=(RMS, RMS)), "norm must be one, or one for each of the 1 branches, got 2"),
        (lambda: ResidualBlock(feedforward(), post="rms"), "post must be None or a norm"),  # pyright: ignore[reportArgumentType]
        (lambda: shaped.propagate(BLOCKS["shaped"], V0, n=N, n_k=5, d=1, samples=1, seed=0), "n_k must be .* head_width = 4 .*, got 5"),
        (lambda: BLOCKS["shaped"].module(N, 5), "n_k must be .* head_width = 4 .*, got 5"),
        (lambda: shaped.propagate(BLOCKS["Post-LN"], V0, n=N, d=1, samples=1, seed=0, path="gram"), "path must be 'tokens'"),
    ],
)
def test_errors_name_the_argument(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [0.0, 0.7])
@pytest.mark.parametrize("gated", [False, True])
def test_the_gram_matrix_of_one_sample_leaves_nothing_out(gated, bias, dtype):
    """Products by halves of the tokens, with an odd number of them, against the same features in whole products."""
    branch = FeedForwardBranch(50, Weights(0.6, bias), Weights(1.0), "silu", gated)
    F = branch.inner.rows(factor(equicorrelated(5, 0.3, dtype=dtype)[None]), 20)
    K, literal = F.new_zeros(5, 5), seed(31)
    branch.add_gram(K, F[0], 20, Stream(literal, 0, dtype=dtype, device=torch.device("cpu")))
    stream, parts = Stream(literal, 0, dtype=dtype, device=torch.device("cpu")), []
    for count in (20, 20, 10):
        H = silu(stream.normal(count, F.shape[-1]) @ F[0].T)
        parts.append(H * (stream.normal(count, F.shape[-1]) @ F[0].T) if gated else H)
    H = torch.cat(parts)
    torch.testing.assert_close(K, H.T @ H)


def test_the_stream_is_factored_once_for_shortcut_and_branch(monkeypatch):
    """A factor takes half of the time of a deep network with many tokens in float32."""
    seen: list[Tensor] = []

    def count(V: Tensor) -> Tensor:
        seen.append(V)
        return factor(V)

    for module in ("shaped.covariance", "shaped.layers.blocks"):
        monkeypatch.setattr(f"{module}.factor", count)
    shaped.propagate(ResidualBlock(feedforward()), V0, n=N, d=1, samples=2, seed=0)
    assert len(seen) == 2  # of the stream and of the branch
