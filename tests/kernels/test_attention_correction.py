"""Identity and centring after the stock kernel: the autograd function on any machine, the kernels on a GPU."""

import pytest
import torch

from shaped.kernels import attention_correction
from shaped.kernels.availability import TRITON
from shaped.nn.attention import running_mean
from shaped.nn.functional import shaped_attention
from shaped.testing.stats import generator

needs_gpu = pytest.mark.skipif(not (torch.cuda.is_available() and TRITON), reason="needs a GPU and Triton")
# A few roundings, relative to the largest entry, which is about 1 or more.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def matrices(q, k, scale, causal):
    """softmax(q k' scale + B) and softmax(B): the reference's outputs for the identity as values."""
    identity = torch.eye(q.shape[-2], dtype=q.dtype, device=q.device).expand(*k.shape[:2], -1, -1)
    P = attention_correction.reference(q, k, identity, 0.0, 0.0, scale, causal)
    return P, P - attention_correction.reference(q, k, identity, 0.0, 1.0, scale, causal)


def forward(q, k, v, gamma1, weight1, gamma2, weight2, scale, causal, save):
    """What the kernels compute, in plain PyTorch: with it the code around them is tested without a GPU."""
    one, two = (torch.as_tensor(w) if g is None else w * g[:, None, None] for g, w in ((gamma1, weight1), (gamma2, weight2)))
    P, R = matrices(q, k, scale, causal)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    out = P @ v + one * v - two * (R @ v)
    return (out, P @ v, q.new_zeros(q.shape[:-1], dtype=torch.float32)) if save else (out, q.new_empty(0), q.new_empty(0))


def backward(do, q, k, v, plain, lse, gamma1, weight1, gamma2, weight2, scale, causal, learned):
    one, two = (torch.as_tensor(w) if g is None else w * g[:, None, None] for g, w in ((gamma1, weight1), (gamma2, weight2)))
    P, R = matrices(q, k, scale, causal)
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    dS = P * (do @ values.mT - (do * plain).sum(-1, keepdim=True)) * (scale or q.shape[-1] ** -0.5)
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dS.mT @ q, P.mT @ do + one * do - two * (R.mT @ do)))
    dgamma = torch.stack([(do * values).sum((0, 2, 3)), -(do * (R @ values)).sum((0, 2, 3))]).float()
    return dS @ keys, dk, dv, dgamma if learned else q.new_empty(0, dtype=torch.float32)


attention_correction.forward_op.register_kernel("cpu")(forward)
attention_correction.backward_op.register_kernel("cpu")(backward)


def inputs(heads, key_heads, m, D, dtype, device):
    g = generator(110)
    shapes = ((2, heads, m, D), (2, key_heads, m, D), (2, key_heads, m, D), (heads, 1, 1), (heads, 1, 1))
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(device, dtype).requires_grad_() for shape in shapes]


def assert_near(ours, theirs, tolerance):
    assert ours.shape == theirs.shape
    assert (ours.double() - theirs).abs().max() <= tolerance * max(theirs.abs().max(), 1.0)


def compare(work, given, causal, tolerance):
    """Output and all gradients of work(*given) against the reference in double precision."""
    exact = [x.detach().double().requires_grad_() for x in given]
    ours, theirs = work(*given), attention_correction.reference(*exact, scale=None, causal=causal)
    assert_near(ours, theirs, tolerance)
    weight = torch.randn(theirs.shape, generator=generator(111), dtype=torch.float64).to(theirs.device)
    gradients = torch.autograd.grad(ours, given, weight.to(ours.dtype)), torch.autograd.grad(theirs, exact, weight.to(ours.dtype).double())
    for one, other in zip(*gradients, strict=True):
        assert_near(one, other, tolerance)


@pytest.fixture
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(attention_correction, "fits", lambda *_: True)
    monkeypatch.setattr(attention_correction, "forward", forward)
    monkeypatch.setattr(attention_correction, "backward", backward)


# PyTorch's compiler makes an instance of Function, against PyTorch's own warning.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.usefixtures("without_a_gpu")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("key_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_one_function_around_the_kernels(causal, key_heads, compiled):
    given = inputs(4, key_heads, 7, 16, torch.float64, "cpu")
    torch._dynamo.reset()

    def work(q, k, v, gamma1, gamma2):
        return shaped_attention(q, k, v, gamma1=gamma1, gamma2=gamma2, is_causal=causal)

    # The gradients of the gains are summed in single precision.
    compare(torch.compile(work, fullgraph=True, backend="aot_eager") if compiled else work, given, causal, 1e-6)


@pytest.mark.usefixtures("without_a_gpu")
def test_only_what_needs_a_gradient_gets_one():
    q, k, v, gamma1, _ = (x.detach() for x in inputs(4, 2, 7, 16, torch.float64, "cpu"))
    given = {"q": q, "k": k, "v": v, "gamma1": gamma1}

    def work(given):
        return shaped_attention(given["q"], given["k"], given["v"], gamma1=given["gamma1"], gamma2=0.5)

    def plain(given):
        return attention_correction.reference(**given, gamma2=0.5, scale=None, causal=False)

    assert not work(given).requires_grad
    assert torch.allclose(work(given), plain(given), rtol=1e-12, atol=1e-12)
    for name in given:
        leaf = given[name].clone().requires_grad_()
        ours, theirs = work(given | {name: leaf}), plain(given | {name: leaf})
        one, other = (torch.autograd.grad(output.square().sum(), leaf)[0] for output in (ours, theirs))
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)


def test_a_gain_for_each_token_is_left_to_the_reference():
    assert attention_correction._is_per_head(torch.ones(4, 1, 1), 4)
    assert attention_correction._is_per_head(torch.ones(()), 4)
    assert not attention_correction._is_per_head(torch.ones(4, 1), 4)
    assert not attention_correction._is_per_head(torch.ones(4, 7, 1), 4)


@needs_gpu
@pytest.mark.parametrize("m", [1, 7, 64, 129, 513, 1100])
@pytest.mark.parametrize("key_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_kernels_are_dense(dtype, causal, key_heads, m):
    given = inputs(4, key_heads, m, 64, dtype, "cuda")
    q, _, v, gamma1, gamma2 = given
    assert attention_correction.fits(q, v, gamma1, gamma2) == (dtype != torch.float32)

    def work(q, k, v, gamma1, gamma2):
        return shaped_attention(q, k, v, gamma1=gamma1, gamma2=gamma2, is_causal=causal)

    compare(work, given, causal, TOLERANCE[dtype])
    with torch.no_grad():
        exact = attention_correction.reference(*(x.double() for x in given), scale=None, causal=causal)
        assert_near(work(*given), exact, TOLERANCE[dtype])


@needs_gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("D", [16, 32, 128, 256])
def test_features(D, causal):
    def work(q, k, v, gamma1, gamma2):
        return shaped_attention(q, k, v, gamma1=gamma1, gamma2=gamma2, is_causal=causal)

    compare(work, inputs(4, 2, 130, D, torch.bfloat16, "cuda"), causal, TOLERANCE[torch.bfloat16])


@needs_gpu
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_compiled_on_a_gpu(causal):
    def work(q, k, v, gamma1, gamma2):
        return shaped_attention(q, k, v, gamma1=gamma1, gamma2=gamma2, is_causal=causal)

    compiled = torch.compile(work, fullgraph=True)
    for m in (129, 300):  # the second time with dynamic lengths
        compare(compiled, inputs(4, 2, m, 64, torch.bfloat16, "cuda"), causal, TOLERANCE[torch.bfloat16])


@needs_gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_any_strides_autocast_and_checkpointing(causal):
    from torch.utils.checkpoint import checkpoint

    given = inputs(4, 2, 130, 64, torch.bfloat16, "cuda")

    def work(q, k, v, gamma1, gamma2):
        # As [batch, tokens, heads, features], and values with features apart.
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        v = v.mT.contiguous().mT
        return shaped_attention(q, k, v, gamma1=gamma1, gamma2=gamma2, is_causal=causal)

    compare(work, given, causal, TOLERANCE[torch.bfloat16])
    compare(lambda *x: checkpoint(work, *x, use_reentrant=False), given, causal, TOLERANCE[torch.bfloat16])
    with torch.autocast("cuda", torch.bfloat16):
        compare(work, inputs(4, 2, 130, 64, torch.float32, "cuda"), causal, TOLERANCE[torch.bfloat16])


@needs_gpu
def test_running_mean_of_a_long_sequence():
    v = torch.randn(1, 1, 20_000, 64, generator=generator(112)).cuda()
    none = torch.zeros(1, 1, 1, 64, device="cuda").expand_as(v)
    mean = torch.empty_like(v)
    attention_correction.correct(none, mean, v, v, None, None, 0.0, -1.0, True, False)
    assert (mean - running_mean(v.double(), torch.float64)).abs().max() < 1e-5


@needs_gpu
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_take_the_reference():
    q, k, v, *_ = (x.detach() for x in inputs(4, 4, 64, 64, torch.bfloat16, "cuda"))
    each = torch.vmap(lambda q, k, v: shaped_attention(q[None], k[None], v[None])[0])(q, k, v)
    assert_near(each, shaped_attention(q, k, v).double(), TOLERANCE[torch.bfloat16])
