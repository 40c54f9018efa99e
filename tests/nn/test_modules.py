"""Trainable modules: their law at initialisation is the theory's, and their schedules do what they say."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

import shaped
from refusals import refused
from shaped.covariance import correlation, gram, vech
from shaped.nn import (
    AttentionShaping,
    DyT,
    Fixed,
    Learn,
    NormBlock,
    Recover,
    ShapedDecoder,
    ShapedEncoder,
    ShapedFeedForwardBlock,
    ShapedSelfAttention,
    ShapedTransformerBlock,
    gains,
    parameter_groups,
    reset_parameters,
    vanilla,
)
from shaped.nn.activations import ShapedGELU
from shaped.nn.functional import shaped_relu
from shaped.nn.initialisations import INITIALISATIONS
from shaped.testing.law import draw_tokens
from shaped.testing.stats import Z, assert_mean, assert_rejected, assert_same_moments, generator, random_covariance, seed

M, N, HEADS, GAMMA, TAU0, C_MINUS = 3, 12, 2, 0.9, 0.2, -3.0


def make_block(width, causal=False, fold=True):
    attention = ShapedSelfAttention(width, HEADS, tau0=TAU0, causal=causal, fold=fold)
    return ShapedTransformerBlock(attention, ShapedFeedForwardBlock(width, width, c_minus=C_MINUS), GAMMA)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fold", [False, True])
def test_a_block_at_initialisation_has_the_theorys_law(causal, fold):
    """One block, hidden width n, against `propagate` of the theory's layers with an output projection.

    All networks at once: made one by one, half as many take eight times as long. So their weights are drawn here, with the deviation
    that the block names, and the test below says that the block draws them so. With these large branches 5 % of gamma are 7 standard
    errors, and 5 % of c_minus 8; 5 % of tau0 are 1.
    """
    V, g, networks = random_covariance(M, 110), generator(111), 10_000
    block = make_block(N, causal, fold).double()
    linear = {f"{name}.weight": part for name, part in block.named_modules() if isinstance(part, nn.Linear)}
    assert {name for name, weight in block.named_parameters() if weight.ndim > 1} == set(linear)
    weights = {
        name: part.__dict__["std"] * torch.randn(networks, *part.weight.shape, generator=g, dtype=torch.float64)
        for name, part in linear.items()
    }
    X = draw_tokens(V, N, g, (networks,))
    with torch.no_grad():
        drawn = gram(vmap(lambda weight, x: functional_call(block, weight, (x,)), chunk_size=4000)(weights, X))
    mask = "causal" if causal else None
    theory = shaped.ShapedAttention(GAMMA, TAU0, HEADS, True, mask) >> shaped.ShapedFeedForward(GAMMA, 0.0, C_MINUS)
    law = shaped.propagate(theory, V, n=N, d=1, samples=20_000, seed=seed(113), record="last")
    assert_same_moments(vech(law.V[-1]), vech(drawn))


@pytest.mark.parametrize("fold", [False, True])
def test_a_blocks_weights_are_normal_with_the_deviation_that_it_names(fold):
    torch.manual_seed(seed(112))
    linear = [part for part in make_block(256, fold=fold).modules() if isinstance(part, nn.Linear)]
    for part in linear:
        weight = part.weight.detach().double().flatten() / part.__dict__["std"]
        moments = torch.stack([weight, weight**2, weight**3, weight**4], 1)
        assert_mean(moments, torch.tensor([0.0, 1.0, 0.0, 3.0]))
        assert_rejected(lambda weight=weight: assert_mean(1.05 * weight**2, 1.0))
    assert len({part.weight[0, 0].item() / part.__dict__["std"] for part in linear}) == len(linear)


def mean_rho(X):
    rho = correlation(gram(X))
    rows, columns = torch.triu_indices(X.shape[-2], X.shape[-2], 1)
    return rho[..., rows, columns].mean(-1)


def test_a_hundred_layers_keep_their_tokens_apart():
    """Mean rho of deep encoders at initialisation is the theory's, about 0; unshaped, the same stack collapses to 1.

    It sees attention without its centring, and feed-forward blocks without shaped slopes. It sees neither a missing identity nor an error
    of a size: four networks leave the mean free by 0.25, and a third more gamma passes. The test of one block sees those.
    """
    depth, n, heads, m, gamma, networks, samples = 100, 96, 4, 8, 0.3, 4, 200
    torch.manual_seed(seed(114))
    X = torch.randn(m, n)
    theory = shaped.ShapedAttention(gamma, heads=heads, project=True) >> shaped.ShapedFeedForward(gamma)
    paths = shaped.solve(theory, gram(X).double(), T=depth / n, samples=samples, seed=seed(115), record="last", upper=1e4)
    rows, columns = torch.triu_indices(m, m, 1)
    expected = paths.rho[-1][:, rows, columns].mean(-1)
    with torch.no_grad():
        found = torch.stack([mean_rho(ShapedEncoder(depth, n, heads, gamma=gamma, hidden=n)(X)) for _ in range(networks)])
        vanilla = ShapedEncoder(depth, n, heads, gamma=gamma, hidden=n, schedule=Recover(1))
        for module in vanilla.modules():
            if isinstance(module, ShapedSelfAttention):  # the usual variance of queries and keys
                for weight in (module.query.weight, module.key.weight):
                    weight.mul_(n**0.25)
        vanilla.schedule.apply(vanilla, 1)
        assert mean_rho(vanilla(X)) > 0.99
    # slopes 1 and 1 - 1/sqrt(n) push rho up faster than the limit says, by about 1/sqrt(n) of their drift (docs/finite.md)
    error = expected.std().item() * math.hypot(networks**-0.5, samples**-0.5)
    assert abs(found.mean().item() - expected.mean().item()) < Z * error + 0.02


def test_recover_ends_at_the_plain_network():
    torch.manual_seed(0)
    encoder = ShapedEncoder(2, N, HEADS, gamma=0.3, schedule=Recover(10))
    X = torch.randn(4, 5, N)
    shapes = []
    for step in (0, 5, 10, 99):
        encoder.schedule.apply(encoder, step)
        block = encoder.blocks[0]
        assert isinstance(block, ShapedTransformerBlock)
        assert block.attention.shaping is not None
        shapes.append(tuple(gain.item() for part in (block.attention.shaping, block.feedforward) for gain in part.scalars()))
    start = 1 - 1 / math.sqrt(N)
    assert shapes[0] == pytest.approx((1.0, 1.0, start))
    assert shapes[1] == pytest.approx((0.5, 0.5, start / 2))
    assert shapes[2] == shapes[3] == (0.0, 0.0, 0.0)

    plain = X
    for block in encoder.blocks:
        assert isinstance(block, ShapedTransformerBlock)
        a, f = block.attention, block.feedforward
        q, k, v = (layer(plain).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (a.query, a.key, a.value))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        plain = block.lam_attention * plain + block.gamma_attention * a.output(mixed.transpose(1, 2).flatten(-2))
        plain = block.lam_feedforward * plain + block.gamma_feedforward * f.post(torch.relu(f.pre(plain)))
    assert torch.equal(encoder(X), plain)
    nothing = torch.zeros(1, 3, N, requires_grad=True)  # where a ReLU's two slopes meet
    block = encoder.blocks[0]
    assert isinstance(block, ShapedTransformerBlock)
    (gradient,) = torch.autograd.grad(block.feedforward(nothing).sum(), nothing)
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize(
    ("schedule", "train", "trained"), [(Fixed(), False, 0), (Fixed(), True, 4), (Learn(), True, 7), (Recover(5), True, 4)]
)
def test_what_is_trained(schedule, train, trained):
    encoder = ShapedEncoder(3, N, HEADS, gamma=0.3, train_gains=train, schedule=schedule)
    assert len(gains(encoder)) == 3 * trained
    encoder(torch.randn(2, 5, N)).square().sum().backward()
    assert all(gain.grad is not None and gain.grad != 0 for gain in gains(encoder).values())
    saved = encoder.state_dict()
    assert sum("gamma1" in name for name in saved) == 3  # saved with the weights, trained or not
    other = ShapedEncoder(3, N, HEADS, gamma=0.1, train_gains=train, schedule=schedule)
    other.load_state_dict(saved)
    X = torch.randn(2, 5, N)
    assert torch.equal(encoder(X), other(X))


def test_slopes_that_are_trained():
    """As if they were numbers, with their gradients."""
    x = torch.randn(4, 50, generator=generator(116), dtype=torch.float64, requires_grad=True)
    slopes = [torch.tensor([s], dtype=torch.float64, requires_grad=True) for s in (0.3, 1.2)]
    plain = 1.2 * x.clamp(min=0) + 0.3 * x.clamp(max=0)
    for found in (shaped_relu(x, *slopes), shaped_relu(x, slopes[0], 1.2), shaped_relu(x, 0.3, slopes[1]), shaped_relu(x, 0.3, 1.2)):
        assert torch.allclose(found, plain, rtol=1e-12, atol=1e-14)
    gradients = torch.autograd.grad(shaped_relu(x, *slopes).sum(), [x, *slopes])
    expected = torch.where(x > 0, 1.2, 0.3).double(), x.clamp(max=0).sum()[None], x.clamp(min=0).sum()[None]
    assert all(torch.allclose(one, other) for one, other in zip(gradients, expected, strict=True))


def test_half_precision_keeps_c_minus():
    """Slopes of 1 + c_-/sqrt(n) are not rounded to bfloat16 themselves: c_- is right to 2^-9, and to 5 standard errors of 2^-9/sqrt(3)."""
    n, samples = 768, 40_000
    x = -torch.randn(samples, generator=generator(117)).abs().bfloat16()
    out = shaped_relu(x, torch.tensor([1 - 1 / math.sqrt(n)]))
    assert out.dtype == torch.bfloat16
    bend = ((out.double() - x.double()) * x.double()).sum() / x.double().square().sum()
    error = 2**-9 / math.sqrt(3) * math.sqrt(3 / samples)  # of a mean with weights x²
    assert bend.item() == pytest.approx(-1 / math.sqrt(n), abs=2**-9 / math.sqrt(n) + 5 * error)


def test_decay_is_for_matrices():
    encoder = ShapedEncoder(2, N, HEADS, gamma=0.3, schedule=Learn())
    matrices, others = parameter_groups(encoder, 0.1)
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {id(p) for p in others["params"]} == {id(p) for p in gains(encoder).values()}
    assert len(matrices["params"]) + len(others["params"]) == len(list(encoder.parameters()))
    encoder.requires_grad_(False)
    assert [group["params"] for group in parameter_groups(encoder)] == [[], []]


def test_what_recover_leaves_is_exported_as_a_plain_network():
    torch.manual_seed(1)
    encoder, X = ShapedEncoder(2, N, HEADS, gamma=0.3, schedule=Recover(10)), torch.randn(4, 5, N)
    encoder.schedule.apply(encoder, 9)
    with refused("gamma1", "0.1", "blocks.0.attention.shaping"):
        vanilla(encoder)
    encoder.schedule.apply(encoder, 10)
    plain = vanilla(encoder)
    assert torch.equal(plain(X), encoder(X))
    assert not [name for name in plain.state_dict() if "shaping" in name or "slope" in name]
    assert len([name for name in encoder.state_dict() if "shaping" in name or "slope" in name]) == 6  # a copy was exported
    shaped_ff = ShapedEncoder(1, N, HEADS, gamma=0.3, schedule=Recover(10))
    shaped_ff.schedule.apply(shaped_ff, 10)
    for module in shaped_ff.modules():
        if isinstance(module, ShapedFeedForwardBlock):
            module.set_shaping(1.0)
    with refused("slopes", "feedforward"):
        vanilla(shaped_ff)


@pytest.mark.parametrize("place", ["pre", "post"])
def test_blocks_with_layer_norm(place):
    """Against PyTorch's own Transformer layer with the same weights."""
    torch.manual_seed(2)
    attention, feedforward = ShapedSelfAttention(N, HEADS, shaped=False), ShapedFeedForwardBlock(N, shaped=False)
    block, X = NormBlock(attention, feedforward, place), torch.randn(3, 5, N)
    theirs = torch.nn.TransformerEncoderLayer(N, HEADS, 4 * N, 0.0, batch_first=True, norm_first=place == "pre", bias=False)
    theirs.self_attn.in_proj_weight.data = torch.cat([layer.weight.data for layer in (attention.query, attention.key, attention.value)])
    theirs.self_attn.out_proj.weight.data = attention.output.weight.data
    theirs.linear1.weight.data, theirs.linear2.weight.data = feedforward.pre.weight.data, feedforward.post.weight.data
    assert torch.allclose(block(X), theirs(X), atol=1e-6)
    variances = [layer.weight.var().item() * fan for layer, fan in ((attention.query, N), (feedforward.pre, N), (feedforward.post, 2 * N))]
    assert variances == pytest.approx([1.0, 1.0, 1.0], rel=5 * math.sqrt(2 / N**2))
    with refused("place", "middle"):
        NormBlock(attention, feedforward, "middle")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", ["shaped", "pre", "post"])
def test_tokens_that_are_asked_for_are_those_of_all(kind):
    torch.manual_seed(170)
    attention, feedforward = ShapedSelfAttention(N, 2), ShapedFeedForwardBlock(N)
    block = ShapedTransformerBlock(attention, feedforward, 0.4) if kind == "shaped" else NormBlock(attention, feedforward, kind)
    X, places = torch.randn(2, 5, N), torch.tensor([[4, 0], [1, 2]])
    expected = torch.stack([tokens[at] for tokens, at in zip(block(X), places, strict=True)])
    assert (block(X, places=places) - expected).abs().max() < 1e-5


def test_a_schedule_does_not_touch_what_another_trains():
    with pytest.raises(ValueError, match="schedule"):
        Recover(10).apply(ShapedEncoder(1, N, HEADS, gamma=0.2, schedule=Learn()), 5)
    half = torch.nn.Sequential(*(ShapedEncoder(1, N, HEADS, gamma=0.2, schedule=schedule) for schedule in (Recover(10), Learn())))
    before = {name: value.clone() for name, value in half.state_dict().items()}
    with refused("schedule", "Recover"):
        Recover(10).apply(half, 5)
    assert all(torch.equal(value, before[name]) for name, value in half.state_dict().items())
    encoder = ShapedEncoder(1, N, HEADS, gamma=0, fold=False)
    encoder.register_parameter("logit_scale", torch.nn.Parameter(torch.tensor(1.0)))
    assert len(gains(encoder)) == 4  # and not the parameter of somebody else


def test_decoders_do_not_look_ahead_and_padding_changes_nothing():
    torch.manual_seed(0)
    X = torch.randn(2, 6, N)
    decoder, encoder = ShapedDecoder(3, N, HEADS, gamma=0.5), ShapedEncoder(3, N, HEADS, gamma=0.5)
    assert torch.allclose(decoder(X)[:, :4], decoder(X[:, :4]), atol=1e-6)
    mask = (torch.arange(6) < 4).expand(2, 1, 1, 6)
    assert torch.allclose(encoder(X, mask)[:, :4], encoder(X[:, :4]), atol=1e-6)


def test_dropout_is_for_training():
    torch.manual_seed(0)
    X, encoder = torch.randn(2, 6, N), ShapedEncoder(2, N, HEADS, gamma=0.5, dropout=0.5)
    assert not torch.equal(encoder(X), encoder(X))
    encoder.eval()
    assert torch.equal(encoder(X), encoder(X))


@pytest.mark.parametrize("schedule", [Fixed(), Learn(), Recover(30)])
def test_a_small_encoder_learns(schedule):
    """A regression of one feature on another. (With fixed shaping attention itself learns very slowly, as the paper reports.)"""
    torch.manual_seed(0)
    encoder = ShapedEncoder(4, 32, 4, gamma=0.3, schedule=schedule)
    optimiser = torch.optim.AdamW(parameter_groups(encoder), lr=3e-3)
    losses = []
    for step in range(120):
        schedule.apply(encoder, step)
        X = torch.randn(32, 6, 32)
        loss = (encoder(X)[..., 0] - X[..., 1]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.25 * sum(losses[:5])


def block(**gammas):
    return ShapedTransformerBlock(ShapedSelfAttention(8, 2), ShapedFeedForwardBlock(8), **gammas)


def test_sizes_may_be_of_numpy_s_small_integers():
    """Four times 64 is 0 in 8 bits."""
    small: Any = np.int8(64)
    block = ShapedFeedForwardBlock(small)
    assert [tuple(weights.shape) for weights in block.parameters()] == [(256, 64), (64, 256)]
    encoder: Any = ShapedEncoder(np.int8(2), small, np.int8(8), gamma=np.float32(0.5))  # pyright: ignore[reportArgumentType]
    assert encoder.blocks[1].start["gamma_attention"] == 0.5
    assert encoder.blocks[1].attention.heads == 8
    assert [type(part) for part in (encoder.blocks[0].attention.heads, encoder.blocks[0].start["gamma_attention"])] == [int, float]


def test_gains_have_names():
    encoder = ShapedEncoder(2, 8, 2, gamma=0.5, schedule=Learn())
    parameters = dict(encoder.named_parameters())
    assert set(gains(encoder)) == {name for name, parameter in parameters.items() if parameter.ndim == 1}
    assert all(gain is parameters[name] for name, gain in gains(encoder).items())


def test_a_model_from_the_meta_device_starts_like_any_other():
    def make():
        attention = ShapedSelfAttention(64, 2, qk_norm=True, qk_gain=True, shaped=False)
        usual = NormBlock(attention, ShapedFeedForwardBlock(64, shaped=False), "pre", lambda width: DyT(width, alpha=0.7))
        INITIALISATIONS["gpt2"].apply(usual.attention, usual.feedforward, 3)
        return nn.Sequential(ShapedEncoder(1, 64, 2, gamma=0.3, tau0=0.5, schedule=Learn()), ShapedEncoder(1, 64, 2, gamma=0.4), usual)

    torch.manual_seed(seed(21))
    expected = make()
    with torch.device("meta"):
        model = make()
    with refused("model", "to_empty", "meta"):
        reset_parameters(model)
    model = model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        nn.init.constant_(tensor, math.nan)
    reset_parameters(model)
    for (name, found), theirs in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        if found.ndim == 1:
            assert torch.equal(found, theirs), name
        else:
            assert abs(float((found.std() / theirs.std()).log())) < Z * found.numel() ** -0.5, name


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Recover(0), ["steps", "0"]),
        (lambda: ShapedSelfAttention(10, 3), ["heads", "10", "3"]),
        (lambda: ShapedSelfAttention(10, 0), ["heads", "0"]),
        (lambda: ShapedSelfAttention(8, 2, tau0=0.0), ["tau0", "0.0"]),
        (lambda: ShapedSelfAttention(8, 2, key_width=0), ["key_width", "0"]),
        (lambda: ShapedFeedForwardBlock(8, 0), ["hidden", "0"]),
        (lambda: ShapedFeedForwardBlock(8, c_minus=math.nan), ["c_minus", "nan"]),
        (lambda: ShapedSelfAttention(0, 1), ["width", "0"]),
        (lambda: ShapedSelfAttention(8, 2, dropout=2.0), ["dropout", "2.0"]),
        (lambda: ShapedEncoder(0, 8, 2, gamma=0.5), ["depth", "0"]),
        (lambda: ShapedEncoder(1, 8, 2, gamma=0.5, schedule="recover"), ["schedule", "Recover(steps)", "recover"]),  # pyright: ignore
        (lambda: ShapedSelfAttention(8, 2, schedule=Recover), ["schedule", "Recover(steps)", "class"]),  # pyright: ignore
        (lambda: parameter_groups(torch.nn.Linear(2, 2), -1.0), ["weight_decay", "-1.0"]),
        (lambda: ShapedEncoder(1, 8, 2, gamma=1.5), ["gamma", "1.5"]),
        (lambda: ShapedEncoder(1, 8, 2, gamma=None), ["gamma", "number", "None"]),  # pyright: ignore
        (lambda: ShapedEncoder(10**9, 8, 2, gamma=0.5), ["depth", "10000", "1000000000"]),
        (lambda: ShapedEncoder(1, None, 2, gamma=0.5), ["width", "whole number", "None"]),  # pyright: ignore
        (lambda: ShapedSelfAttention(None, 2), ["width", "whole number", "None"]),  # pyright: ignore
        (lambda: ShapedFeedForwardBlock(None), ["width", "whole number", "None"]),  # pyright: ignore
        (lambda: ShapedFeedForwardBlock(8, c_minus=1e50), ["c_minus", "1e+30", "1e+50"]),
        (lambda: ShapedFeedForwardBlock(8, c_minus=-2.0, activation=ShapedGELU()), ["c_minus", "-1.0", "activation", "-2.0"]),
        (lambda: ShapedEncoder(1, 8, 2, gamma=0.5, c_minus=-2.0, activation=ShapedGELU()), ["c_minus", "-1.0", "activation", "-2.0"]),
        (lambda: ShapedSelfAttention(8, 2, tau0=1e-50), ["tau0", "1e-30", "1e-50"]),
        (lambda: AttentionShaping(gamma2=1e50), ["gamma2", "1e+30", "1e+50"]),
        (lambda: block(gamma=0.5, gamma_feedforward="x"), ["gamma_feedforward", "number", "x"]),
        (lambda: block(gamma=0.5, gamma_feedforward=2.0), ["gamma_feedforward", "2.0"]),
        (lambda: block(gamma="x", gamma_feedforward=0.5), ["gamma must", "x"]),
        (lambda: ShapedSelfAttention(8, 2, causal="no"), ["causal", "True or False", "no"]),  # pyright: ignore
        (lambda: ShapedEncoder(1, 8, 2, gamma=0.5, qk_norm="no"), ["qk_norm", "True or False", "no"]),  # pyright: ignore
        (lambda: ShapedEncoder(1, 8, 2, gamma=0.5, train_gains="no"), ["train_gains", "True or False", "no"]),  # pyright: ignore
        (lambda: ShapedFeedForwardBlock(8, shaped="no"), ["shaped", "True or False", "no"]),  # pyright: ignore
    ],
)
def test_wrong_input_is_named(call, words):
    with refused(*words):
        call()
