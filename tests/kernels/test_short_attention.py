"""Attention of short sequences from one product: the custom operator on any machine, the kernels on a GPU."""

import pytest
import torch

from shaped.kernels import short_attention
from shaped.kernels.availability import TRITON, assume_constant
from shaped.testing.stats import generator

needs_gpu = pytest.mark.skipif(not (torch.cuda.is_available() and TRITON), reason="needs a GPU and Triton")
TOLERANCE = {torch.float64: 1e-12, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # a few roundings, relative to the largest entry


def split(qkv, heads):
    return (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in qkv.chunk(3, -1))


def forward(qkv, gamma1, gamma2, heads, scale, qk_eps):
    """What the kernels compute, in plain PyTorch: with it the code around them is tested without a GPU."""
    stats = qkv.new_zeros(1 if qk_eps is None else 3, len(qkv), heads, qkv.shape[1], dtype=torch.float32)
    return short_attention.reference(qkv, gamma1, gamma2, heads, scale, qk_eps=qk_eps), stats


def backward(do, qkv, stats, gamma1, gamma2, heads, scale, qk_eps, gains):
    q, k, v = split(qkv, heads)
    do = do.unflatten(-1, (heads, -1)).transpose(1, 2)
    q_r, k_r = (1.0 if qk_eps is None else (x.square().mean(-1, keepdim=True) + qk_eps) ** -0.5 for x in (q, k))
    P = torch.softmax((q * q_r) @ (k * k_r).mT * scale, -1)
    dP = do @ v.mT
    dS = P * (dP - (P * dP).sum(-1, keepdim=True)) * scale
    dq, dk, dv = dS @ (k * k_r) * q_r, dS.mT @ (q * q_r) * k_r, P.mT @ do
    if qk_eps is not None:  # the lengths are fixed: less of what would change them
        dq, dk = (dx - x * r**2 * (x * dx).mean(-1, keepdim=True) for dx, x, r in ((dq, q, q_r), (dk, k, k_r)))
    if gamma1 is not None:
        dv = dv + gamma1 * do - gamma2 * do.mean(-2, keepdim=True)
    dgamma = torch.stack([(do * v).sum(3), -(do * v.mean(-2, keepdim=True)).sum(3)]).flatten(1).float()
    dqkv = torch.cat([x.transpose(1, 2).flatten(-2) for x in (dq, dk, dv)], -1)
    return dqkv, dgamma if gains else qkv.new_empty(2, 0, dtype=torch.float32)


short_attention.forward_op.register_kernel("cpu")(forward)
short_attention.backward_op.register_kernel("cpu")(backward)


def compare(m, heads, D, dtype, device, shaped=True, learned=True, batch=3, qk_eps=None):
    """Output and all gradients against the reference in double precision."""
    qkv = torch.randn(batch, m, 3 * heads * D, generator=generator(120), dtype=torch.float64).to(device, dtype).requires_grad_()
    gammas = [torch.tensor([value], device=device, requires_grad=learned) for value in (0.7, 0.4)] if shaped else [None, None]
    given = [qkv, *(gamma for gamma in gammas if gamma is not None and learned)]
    exact = [x.detach().double().requires_grad_() for x in given]
    ours = short_attention.attention(qkv, gammas[0], gammas[1], heads, 0.2, qk_eps)
    one, two = exact[1:] if learned else [gamma if gamma is None else gamma.double() for gamma in gammas]
    theirs = short_attention.reference(exact[0], one, two, heads, 0.2, qk_eps=qk_eps)
    weight = torch.randn(theirs.shape, generator=generator(121), dtype=torch.float64).to(device, dtype)
    found = [ours, *torch.autograd.grad(ours, given, weight)]
    expected = [theirs, *torch.autograd.grad(theirs, exact, weight.double())]
    for one, other in zip(found, expected, strict=True):
        # The gradients of the gains are summed in single precision.
        tolerance = max(TOLERANCE[dtype], 1e-6 if one.numel() == 1 else 0.0)
        assert one.shape == other.shape
        assert (one.double() - other).abs().max() <= tolerance * max(other.abs().max(), 1.0)


@pytest.mark.parametrize(("shaped", "learned"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("qk_eps", [None, 0.1])
def test_one_operator_around_the_kernels(shaped, learned, qk_eps):
    compare(7, 2, 5, torch.float64, "cpu", shaped, learned, qk_eps=qk_eps)


@pytest.mark.parametrize("qk_eps", [None, 0.1])
def test_the_operator_is_as_pytorch_wants_it(qk_eps):
    qkv = torch.randn(2, 5, 24, generator=generator(122), requires_grad=True)
    gammas = [torch.tensor([value], requires_grad=True) for value in (0.7, 0.4)]
    torch.library.opcheck(short_attention.forward_op, (qkv, *gammas, 2, 0.3, qk_eps))


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("shaped", [True, False])
def test_a_layer_with_one_product_uses_it(shaped, qk_norm, monkeypatch):
    """One matrix for queries, keys and values: the same outputs with the operator and without it."""
    from shaped.nn.modules import ShapedSelfAttention, make_linear

    attention = ShapedSelfAttention(16, 2, shaped=shaped, qk_norm=qk_norm).double()
    x = torch.randn(2, 5, 16, generator=generator(123), dtype=torch.float64)
    padding = torch.arange(5) < torch.tensor([5, 3])[:, None, None, None]
    expected, padded = attention(x), attention(x, padding)
    qkv = make_linear(16, 48, 1.0).double()
    qkv.weight.data = torch.cat([layer.weight for layer in (attention.query, attention.key, attention.value)]).detach()
    attention.join(qkv)
    assert (attention(x) - expected).abs().max() < 1e-12
    calls = []
    monkeypatch.setattr(short_attention, "fits", lambda qkv, D: True)
    monkeypatch.setattr(short_attention, "attention", lambda *given: calls.append(given) or short_attention.forward_op(*given)[0])
    assert (attention(x) - expected).abs().max() < 1e-12
    assert len(calls) == 1
    assert (attention(x, padding) - padded).abs().max() < 1e-12
    assert len(calls) == 1, "it takes no masks"


def test_cpus_and_single_precision_take_the_fallback():
    assert not short_attention.fits(torch.zeros(2, 5, 24), 4)
    assert not short_attention.fits(torch.zeros(2, 5, 24, dtype=torch.bfloat16), 4)


def test_old_gpus_take_the_fallback(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert short_attention._is_allowed(0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not short_attention._is_allowed(0)


@needs_gpu
@pytest.mark.parametrize(
    ("m", "D", "dtype"),
    [
        (1, 8, torch.bfloat16),
        (7, 24, torch.bfloat16),
        (64, 64, torch.float16),
        (100, 96, torch.bfloat16),
        (128, 96, torch.bfloat16),
        (128, 128, torch.float16),
    ],
)
def test_kernels_are_the_formula(m, D, dtype):
    """A few shapes: Triton compiles each anew, and its interpreter has seen more of them (test_interpreted.py)."""
    qkv = torch.zeros(1, m, 6 * D, dtype=dtype, device="cuda")
    assert short_attention.fits(qkv, D)
    for shaped, learned in ((True, True), (True, False), (False, False)):
        for qk_eps in (None, 0.1):
            compare(m, 2, D, dtype, "cuda", shaped, learned, qk_eps=qk_eps)


@needs_gpu
def test_longer_sequences_and_chosen_kernels_take_the_fallback():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    qkv = torch.zeros(1, 129, 3 * 64, dtype=torch.bfloat16, device="cuda")
    assert not short_attention.fits(qkv, 64)
    with sdpa_kernel(SDPBackend.MATH):
        assert not short_attention.fits(qkv[:, :128], 64)


def test_constants_are_marked_as_pytorch_marks_them():
    def ours():
        pass

    def theirs():
        pass

    assume_constant(ours)
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs) != {}
