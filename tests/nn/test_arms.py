"""QK-norm, norms and initialisations of the baselines: their formulas, number by number, and the law of normalised logits."""

import math

import pytest
import torch

from refusals import refused
from shaped.nn import DyT, Learn, NormBlock, RMSNorm, ShapedEncoder, ShapedFeedForwardBlock, ShapedSelfAttention, gains, parameter_groups
from shaped.nn.functional import attention_matrix, rms_norm
from shaped.nn.initialisations import INITIALISATIONS
from shaped.nn.norms import NORMS
from shaped.testing.stats import assert_covariance, assert_rejected, generator, seed

N, HEADS, TAU0 = 12, 2, 0.4


def make(**arguments) -> ShapedSelfAttention:
    torch.manual_seed(0)
    return ShapedSelfAttention(N, HEADS, **arguments).double()


def make_tokens(m: int = 5, n: int = N) -> torch.Tensor:
    return torch.randn(3, m, n, generator=generator(1), dtype=torch.float64)


def test_the_root_mean_square_norm():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-3, -1e-3]], dtype=torch.float64)
    mean_squares = (12.5, 0.0, 1e-6)
    for row, normalised, square in zip(x, rms_norm(x), mean_squares, strict=True):
        assert normalised.tolist() == pytest.approx((row / math.sqrt(square + 1e-6)).tolist(), rel=1e-12)
    half = torch.randn(4, 96, generator=generator(2)).bfloat16()
    assert torch.equal(rms_norm(half), rms_norm(half.float()).bfloat16())  # computed in single precision, rounded once


@pytest.mark.parametrize("shaped", [True, False])
@pytest.mark.parametrize("gain", [False, True])
def test_attention_with_qk_norm(shaped, gain):
    """Head by head. The usual temperature of plain attention, tau0 sqrt(n n_k) of a shaped one."""
    attention, X = make(qk_norm=True, qk_gain=gain, shaped=shaped, tau0=TAU0 if shaped else None), make_tokens()
    factors = torch.ones(2, N // HEADS, dtype=torch.float64)
    assert (attention.qk_gains is not None) == gain
    if attention.qk_gains is not None:
        assert torch.equal(torch.stack(list(attention.qk_gains.parameters())), factors)
        factors = torch.rand(2, N // HEADS, generator=generator(3), dtype=torch.float64) + 0.5
        attention.qk_gains.query.data, attention.qk_gains.key.data = factors
    mixed = []
    for h in range(HEADS):
        rows = slice(h * N // HEADS, (h + 1) * N // HEADS)
        q, k, v = (X @ layer.weight[rows].mT for layer in (attention.query, attention.key, attention.value))
        q, k = (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * factor for x, factor in zip((q, k), factors, strict=True))
        logits = q @ k.mT / math.sqrt(N // HEADS) / (TAU0 * math.sqrt(N) if shaped else 1.0)
        mixed.append(attention_matrix(logits, torch.zeros_like(logits), float(shaped), float(shaped)) @ v)
    assert torch.allclose(attention(X), torch.cat(mixed, -1) @ attention.output.weight.mT, atol=1e-12)


def test_the_scale_of_queries_and_keys_is_normalised_away():
    """Their weights start with variance 1/n, whether or not the temperature is folded into weights elsewhere."""
    folded, scaled = (make(qk_norm=True, tau0=TAU0, fold=fold) for fold in (True, False))
    assert torch.equal(folded.query.weight, scaled.query.weight)
    assert folded.scale == scaled.scale == pytest.approx((TAU0 * math.sqrt(N) * math.sqrt(N // HEADS)) ** -1)
    assert folded.query.std == folded.key.std == N**-0.5
    X, other = make_tokens(), make()
    changes = []
    for attention in (folded, other):
        before = attention(X)
        with torch.no_grad():
            attention.query.weight.mul_(3.0)
            attention.key.weight.mul_(5.0)
        changes.append((attention(X) - before).abs().max().item())
    assert changes[0] < 1e-5 < 1e-3 < changes[1]  # eps is 1e-6 of the mean square


def test_logits_of_normalised_queries_and_keys_see_correlations_not_lengths():
    """sqrt(n) tau0 times the logits has the covariance rho rho at initialisation, for tokens of lengths 1 and 3.

    It is exact for a token with itself. Normalised queries of correlated tokens are a little less correlated than the tokens:
    by a share of about (1 - rho^2)/2n_k.
    """
    n, heads, n_k, rho = 64, 64, 32, 0.6
    X = math.sqrt(n) * torch.eye(n)[:2]
    X = torch.stack([X[0], 3.0 * (rho * X[0] + math.sqrt(1 - rho**2) * X[1])])
    drawn = []

    def keep(attention: ShapedSelfAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None):
        drawn.append((q @ k.mT * attention.scale * math.sqrt(n) * TAU0).flatten(-2))
        return v

    torch.manual_seed(seed(4))
    with torch.no_grad():
        for _ in range(320):
            ShapedSelfAttention(n, heads, key_width=n_k, tau0=TAU0, qk_norm=True)(X, attend=keep)
    correlations = torch.tensor([[1.0, rho], [rho, 1.0]], dtype=torch.float64)
    samples, expected = torch.cat(drawn).double(), torch.kron(correlations, correlations)
    bias = 1.0 - (1.0 - (1 - rho**2) / (2 * n_k)) ** 2
    assert_covariance(samples, expected, bias=bias)
    assert_rejected(lambda: assert_covariance(1.05 * samples, expected, bias=bias))


def test_gains_of_qk_norm_are_vectors_without_decay_and_no_shaping():
    encoder = ShapedEncoder(2, N, HEADS, gamma=0.3, schedule=Learn(), qk_norm=True, qk_gain=True)
    vectors = {name for name, _ in encoder.named_parameters() if "qk_gains" in name}
    assert len(vectors) == 4
    assert not vectors & gains(encoder).keys()
    without_decay = {id(parameter) for parameter in parameter_groups(encoder)[1]["params"]}
    assert all(id(encoder.get_parameter(name)) in without_decay for name in vectors)


def test_the_kernel_for_short_sequences_has_no_gains_of_qk_norm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shaped.kernels.short_attention.fits", lambda x, D: True)
    assert make(qk_norm=True).fits_short_kernel(make_tokens())
    assert not make(qk_norm=True, qk_gain=True).fits_short_kernel(make_tokens())


@pytest.mark.parametrize("arguments", [{"qk_norm": True}, {"qk_norm": True, "qk_gain": True}])
def test_qk_norm_compiles_exports_and_works_in_half_precision(arguments):
    torch.manual_seed(0)
    attention, X = ShapedSelfAttention(N, HEADS, tau0=TAU0, **arguments), make_tokens().float()
    exported = torch.export.export(attention, (X,)).module()
    assert torch.allclose(exported(X), attention(X), atol=1e-6)
    assert torch.allclose(torch.compile(attention, fullgraph=True, backend="aot_eager")(X), attention(X), atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        half = attention(X)
    assert half.dtype == torch.bfloat16
    assert (half - attention(X)).abs().max() < 2**-5 * attention(X).abs().max()


def test_dyt():
    norm, x = DyT(3, alpha=0.8).double(), torch.tensor([-2.0, 0.1, 5.0], dtype=torch.float64)
    assert norm(x).tolist() == pytest.approx([math.tanh(0.8 * value) for value in x.tolist()], abs=1e-7)  # alpha is rounded to float32
    norm.weight.data, norm.bias.data = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.5, -1.0]], dtype=torch.float64)
    norm.alpha.data.fill_(0.25)
    expected = [gain * math.tanh(0.25 * value) + bias for gain, bias, value in ((1, 0, -2.0), (2, 0.5, 0.1), (3, -1, 5.0))]
    assert norm(x).tolist() == pytest.approx(expected, rel=1e-12)
    norm.reset_parameters()
    assert [norm.alpha.item(), norm.weight.tolist(), norm.bias.tolist()] == [pytest.approx(0.8), [1.0] * 3, [0.0] * 3]
    assert DyT(3).alpha.item() == 0.5
    with refused("alpha", "0.0"):
        DyT(3, alpha=0.0)


def test_rms_norm_has_a_gain_and_takes_other_precisions():
    norm, x = RMSNorm(4), torch.randn(2, 4, generator=generator(5))
    norm.weight.data = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert torch.allclose(norm(x), rms_norm(x) * norm.weight)
    assert norm(x.bfloat16()).dtype == torch.float32  # as LayerNorm under autocast; PyTorch's own RMSNorm would warn
    assert norm.eps == 1e-6


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("place", ["pre", "post"])
def test_blocks_have_the_norm_they_are_given(place, kind):
    attention, feedforward, X = make(shaped=False), ShapedFeedForwardBlock(N, shaped=False).double(), make_tokens()
    norm = NORMS[kind].make(N).double()
    block = NormBlock(attention, feedforward, place, NORMS[kind].make).double()
    if place == "pre":
        Z = X + attention(norm(X))
        expected = Z + feedforward(norm(Z))
    else:
        Z = norm(X + attention(X))
        expected = norm(Z + feedforward(Z))
    assert torch.allclose(block(X), expected, atol=1e-12)


@pytest.mark.parametrize(("kind", "inner", "outputs"), [("bert", 0.02, 0.02), ("gpt2", 0.02, 0.02 / math.sqrt(2 * 18))])
def test_initialisations(kind, inner, outputs):
    torch.manual_seed(seed(6))
    attention, feedforward = ShapedSelfAttention(64, 2, shaped=False), ShapedFeedForwardBlock(64, shaped=False)
    INITIALISATIONS[kind].apply(attention, feedforward, depth=18)
    for matrix in (attention.query, attention.key, attention.value, feedforward.pre, attention.output, feedforward.post):
        std = outputs if matrix in (attention.output, feedforward.post) else inner
        assert matrix.std == pytest.approx(std)
        assert matrix.weight.square().mean().item() == pytest.approx(std**2, rel=5 * math.sqrt(2 / matrix.weight.numel()))


def test_what_would_be_ignored_is_refused():
    with refused("qk_gain", "qk_norm", "True"):
        make(qk_gain=True)
