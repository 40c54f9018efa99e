"""shaped_attention on fused kernels equals the attention matrix written out, forward and backward."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from refusals import refused
from shaped.nn import attention
from shaped.nn.attention import running_mean, running_mean_by_blocks
from shaped.nn.functional import attention_matrix, shaped_attention
from shaped.testing.stats import generator

B, HEADS, K, E = 2, 4, 7, 5
MASKS = ["full", "causal", "padding left", "padding right", "window", "bool", "bool by head", "bias", "causal and padding", "rows masked"]


def test_a_bias_that_is_nan_is_not_hidden():
    """As with `scaled_dot_product_attention`: a learned bias that diverged must be seen, also in rows that are masked otherwise."""
    q = torch.randn(1, 2, 5, 8, generator=generator(0))
    bias = torch.zeros(5, 5)
    bias[1], bias[2] = math.nan, -math.inf
    bias[3, 0], bias[3, 1:] = math.nan, -math.inf
    out = shaped_attention(q, q, q, attn_mask=bias)
    assert [bool(row.isnan().all()) for row in out[0, 0]] == [False, True, False, True, False]
    assert out[:, :, 2].eq(0.0).all()  # a query that may attend to nothing


@pytest.mark.parametrize("causal", [False, True])
def test_a_scale_of_zero_leaves_the_identity(causal: bool):
    """All logits are 0, so softmax and centring cancel. PyTorch's own causal attention is nan there on a CPU."""
    q, k, v = (torch.randn(1, 2, 5, 8, generator=generator(i)).requires_grad_() for i in range(3))
    out = shaped_attention(q, k, v, scale=0.0, is_causal=causal, gamma1=0.7)
    torch.testing.assert_close(out, 0.7 * v)
    assert all(torch.autograd.grad(out.sum(), x, retain_graph=True)[0].isfinite().all() for x in (q, k, v))


def test_a_compiled_decode_loop_takes_any_length_of_the_cache():
    compiled = torch.compile(shaped_attention, fullgraph=True, backend="eager")
    for length in (8, 9, 10):
        q, k, v = (torch.randn(2, 4, length, 16, generator=generator(length + i)) for i in range(3))
        for queries in (1, 2):
            given = q[:, :, -queries:], k, v
            torch.testing.assert_close(compiled(*given, is_causal=True), shaped_attention(*given, is_causal=True))


def test_whole_numbers_and_unwanted_groups_are_refused():
    q, k = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8)
    with refused("q must have floating-point numbers, got torch.int64"):
        shaped_attention(q.long(), k.long(), k.long())
    with refused("k must have as many heads as q, 4, without enable_gqa, got 2"):
        shaped_attention(q, k, k, enable_gqa=False)
    assert torch.equal(shaped_attention(q, k, k, enable_gqa=True), shaped_attention(q, k, k))


def dense(q, k, v, gamma1, gamma2, scale, allowed, bias, places):
    """Everything written out: logits, bias, two softmaxes, identity, and zeros where nothing may be attended to."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    bias = torch.where(allowed, bias, -math.inf).expand(B, q.shape[1], q.shape[2], k.shape[2])
    some = (bias > -math.inf).any(-1, keepdim=True)
    bias = torch.where(some, bias, 0.0)
    A = torch.softmax(q @ k.mT * scale + bias, -1) - gamma2 * torch.softmax(bias, -1)
    A = A + gamma1 * torch.nn.functional.one_hot(places, k.shape[2]).to(q)
    return torch.where(some, A, 0.0) @ v


def case(kind, Q) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Arguments of shaped_attention and of the dense reference for a kind of mask, for the last Q of K tokens."""
    places, keys = torch.arange(K - Q, K), torch.arange(K)
    past = keys <= places[:, None]
    lengths = torch.tensor([4, 6])
    padding = {"left": keys >= K - lengths[:, None], "right": keys < lengths[:, None]}
    g = generator(100)
    everything, none = torch.ones(Q, K, dtype=torch.bool), torch.zeros(1, dtype=torch.float64)
    if kind == "full":
        return {}, everything, none
    if kind == "causal":
        return {"is_causal": True}, past, none
    if kind.startswith("padding"):
        mask = padding[kind.split()[1]][:, None, None, :]
        return {"attn_mask": mask}, mask, none
    if kind == "causal and padding":
        mask = padding["left"][:, None, None, :]
        return {"attn_mask": mask, "is_causal": True}, mask & past, none
    if kind == "window":
        mask = past & (keys > places[:, None] - 3)
        return {"attn_mask": mask}, mask, none
    if kind == "bool":
        mask = torch.rand(B, 1, Q, K, generator=g) < 0.6
        mask[..., 0] = True
        return {"attn_mask": mask}, mask, none
    if kind == "bool by head":
        mask = torch.rand(B, HEADS, Q, K, generator=g) < 0.6
        mask[..., 0] = True
        return {"attn_mask": mask}, mask, none
    if kind == "bias":
        bias = torch.randn(HEADS, Q, K, generator=g, dtype=torch.float64)
        bias[..., 0, 2] = -math.inf
        return {"attn_mask": bias}, everything, bias
    mask = past.clone()
    mask[0] = False
    return {"attn_mask": mask}, mask, none


def inputs(heads, key_heads, Q, dtype=torch.float64):
    g = generator(101)
    shapes = ((B, heads, Q, E), (B, key_heads, K, E), (B, key_heads, K, E), (heads, 1, 1), (heads, 1, 1))
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("key_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("Q", [K, 1, 3], ids=["no cache", "cache", "chunked prefill"])
def test_fused_is_dense(kind, key_heads, Q):
    q, k, v, gamma1, gamma2 = given = inputs(HEADS, key_heads, Q)
    arguments, allowed, bias = case(kind, Q)
    ours = shaped_attention(q, k, v, gamma1=gamma1, gamma2=gamma2, scale=0.7, **arguments)
    theirs = dense(q, k, v, gamma1, gamma2, 0.7, allowed, bias, torch.arange(K - Q, K))
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    weight = torch.randn(ours.shape, generator=generator(102), dtype=torch.float64)
    gradients = [torch.autograd.grad((output * weight).sum(), given) for output in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["full", "causal", "bool"])
def test_queries_may_stand_anywhere(kind):
    """A static cache: the keys go on after the queries. Also with places that differ between the batch's rows."""
    q, k, v, *_ = inputs(HEADS, 2, 3)
    places = torch.tensor([[1, 2, 3], [3, 4, 5]])
    past = torch.arange(K) <= places[:, None, :, None]
    mask = {"full": None, "causal": None, "bool": past}[kind]
    allowed = torch.ones(3, K, dtype=torch.bool) if kind == "full" else past
    ours = shaped_attention(q, k, v, is_causal=kind == "causal", attn_mask=mask, positions=places)
    theirs = dense(q, k, v, 1.0, 1.0, E**-0.5, allowed, torch.zeros(1, dtype=torch.float64), places[:, None])
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    same_for_all = shaped_attention(q, k, v, is_causal=True, positions=places[0])
    assert torch.allclose(same_for_all[:1], shaped_attention(q[:1], k[:1], v[:1], is_causal=True, positions=places[:1]))


def test_one_formula_with_the_theory():
    """The theory's attention matrix, applied to the values, is shaped_attention."""
    q, k, v, *_ = inputs(HEADS, HEADS, K)
    A = attention_matrix(q @ k.mT * 0.3, torch.zeros(K, K, dtype=torch.float64))
    assert torch.allclose(A @ v, shaped_attention(q, k, v, scale=0.3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["full", "causal", "bool", "padding right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_gains_it_is_plain_attention_bit_for_bit(kind, dtype):
    q, k, v, *_ = inputs(HEADS, 2, K, dtype)
    arguments, *_ = case(kind, K)
    plain = scaled_dot_product_attention(q, k, v, enable_gqa=True, **arguments)
    assert torch.equal(shaped_attention(q, k, v, gamma1=0.0, gamma2=0.0, **arguments), plain)
    zero = torch.zeros((), dtype=dtype)
    assert torch.equal(shaped_attention(q, k, v, gamma1=zero, gamma2=zero, **arguments), plain)


def test_padding_changes_nothing():
    """Tokens after a sequence that may not be attended to do not change the sequence's outputs."""
    q, k, v, *_ = inputs(HEADS, 2, K)
    mask = (torch.arange(K) < 4).expand(B, 1, 1, K)
    padded = shaped_attention(q, k, v, attn_mask=mask)[:, :, :4]
    assert torch.allclose(padded, shaped_attention(q[:, :, :4], k[:, :, :4], v[:, :, :4]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["full", "causal", "padding right", "bool", "causal and padding", "rows masked"])
def test_compiled_and_exported(kind):
    q, k, v, gamma1, gamma2 = inputs(HEADS, 2, K)
    arguments, *_ = case(kind, K)

    def work(q, k, v, gamma1, gamma2):
        return shaped_attention(q, k, v, gamma1=gamma1, gamma2=gamma2, **arguments)

    eager = work(q, k, v, gamma1, gamma2)
    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")(q, k, v, gamma1, gamma2)
    assert torch.allclose(eager, compiled, rtol=1e-12, atol=1e-12)

    class Module(torch.nn.Module):
        forward = staticmethod(work)

    exported = torch.export.export(Module(), tuple(x.detach() for x in (q, k, v, gamma1, gamma2)))
    assert torch.allclose(eager, exported.module()(q, k, v, gamma1, gamma2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["full", "causal", "padding right", "bool", "causal and padding"])
def test_half_precision_and_autocast(kind):
    q, k, v, *_ = inputs(HEADS, 2, K)
    arguments, *_ = case(kind, K)
    exact = shaped_attention(q, k, v, **arguments)
    half = shaped_attention(*(x.bfloat16() for x in (q, k, v)), **arguments)
    assert half.dtype == torch.bfloat16
    assert (half.double() - exact).abs().max() < 0.03 * exact.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        auto = shaped_attention(*(x.float() for x in (q, k, v)), **arguments)
    assert (auto.double() - exact).abs().max() < 0.03 * exact.abs().max()


def test_gradient_checkpointing():
    from torch.utils.checkpoint import checkpoint

    given = inputs(HEADS, 2, K)

    def work(q, k, v, gamma1, gamma2):
        return shaped_attention(q, k, v, gamma1=gamma1, gamma2=gamma2, is_causal=True)

    plain = torch.autograd.grad(work(*given).square().sum(), given)
    kept = torch.autograd.grad(checkpoint(work, *given, use_reentrant=False).square().sum(), given)
    assert all(torch.equal(one, other) for one, other in zip(plain, kept, strict=True))


def test_dropout_leaves_identity_and_centring():
    q, k, v, *_ = inputs(HEADS, HEADS, K)
    alone = shaped_attention(q, k, v, dropout_p=1.0)
    assert torch.allclose(alone, v - v.mean(-2, keepdim=True), rtol=1e-12, atol=1e-12)


Q4 = torch.zeros(B, 4, K, E)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"q": torch.zeros(K, E)}, ["q must", "(7, 5)"]),
        ({"k": Q4.double()}, ["k must", "float32", "float64"]),
        ({"k": torch.zeros(B, 3, K, E), "v": torch.zeros(B, 3, K, E)}, ["k must", "4", "3"]),
        ({"k": torch.zeros(B, 4, K, E + 1)}, ["k must", "5", "6"]),
        ({"k": torch.zeros(3, 4, K, E), "v": torch.zeros(3, 4, K, E)}, ["k must", "batch"]),
        ({"v": torch.zeros(B, 4, K - 1, E)}, ["v must", "(2, 4, 6)"]),
        ({"k": Q4[:, :, :3], "v": Q4[:, :, :3]}, ["q must", "3", "7"]),
        ({"attn_mask": torch.ones(K, K + 1, dtype=torch.bool)}, ["attn_mask", "(7, 8)"]),
        ({"attn_mask": torch.ones(K, dtype=torch.bool)}, ["attn_mask", "(7,)"]),
        ({"attn_mask": torch.ones(3, 1, K, K, dtype=torch.bool)}, ["attn_mask", "(3, 1, 7, 7)"]),
        ({"attn_mask": torch.ones(K, K, dtype=torch.float64)}, ["attn_mask", "float64"]),
        ({"positions": torch.arange(3)}, ["positions", "(3,)"]),
        ({"positions": torch.zeros(K)}, ["positions", "float32"]),
        ({"positions": torch.arange(1, K + 1)}, ["positions", "0 to 6", "7"]),
        ({"positions": torch.arange(-1, K - 1)}, ["positions", "0 to 6", "-1"]),
        ({"gamma1": float("nan")}, ["gamma1", "nan"]),
        ({"scale": float("inf")}, ["scale", "finite", "inf"]),
        ({"scale": float("nan")}, ["scale", "finite", "nan"]),
        ({"scale": 1e60}, ["scale", "1e+30", "1e+60"]),
        ({"scale": "x"}, ["scale", "number", "x"]),
        ({"k": Q4.to("meta"), "v": Q4}, ["k must", "meta"]),
    ],
)
def test_wrong_input_is_named(arguments, words):
    usual: dict[str, Any] = {"q": Q4, "k": Q4, "v": Q4} | arguments
    with refused(*words):
        shaped_attention(usual.pop("q"), usual.pop("k"), usual.pop("v"), **usual)


@pytest.fixture(params=["sums", "blocks"])
def form(request, monkeypatch):
    """Running means as on a CPU, and as on a GPU."""
    if request.param == "blocks":
        monkeypatch.setattr(torch.Tensor, "is_cpu", False)


@pytest.mark.parametrize("m", [1, 63, 64, 65, 200])
def test_running_mean(m, form):
    v = torch.randn(2, 3, m, 4, generator=generator(103), dtype=torch.float64)
    exact = v.cumsum(-2) / torch.arange(1, m + 1)[:, None]
    assert torch.allclose(running_mean(v, v.dtype), exact, rtol=1e-12, atol=1e-13)
    half = running_mean(v.bfloat16(), torch.float32)
    assert (half.double() - exact).abs().max() < 0.02


def test_few_tokens_need_no_block_on_a_cpu(monkeypatch):
    """Eight tokens took as long as 64."""
    monkeypatch.setattr(attention, "running_mean_by_blocks", None)
    v = torch.randn(1, 2, 8, 4, generator=generator(105))
    assert torch.allclose(shaped_attention(v, v, v, is_causal=True)[:, :, 0], v[:, :, 0])


@pytest.mark.parametrize("m", [3, 200])
def test_running_mean_of_what_is_no_padding(m, form):
    g = generator(104)
    v, real = torch.randn(2, 3, m, 4, generator=g, dtype=torch.float64), torch.rand(2, 1, m, 1, generator=g) < 0.5
    real[0, :, :2], real[1, :, 0] = False, True
    exact = (v * real).cumsum(-2) / real.cumsum(-2).clamp(min=1)
    assert torch.allclose(running_mean(v, v.dtype, real), exact, rtol=1e-12, atol=1e-13)
    assert (running_mean(v.bfloat16(), torch.float32, real).double() - exact).abs().max() < 0.02


@pytest.mark.parametrize("kind", MASKS)
def test_centring_takes_a_second_attention_for_few_masks(kind, monkeypatch):
    calls = []
    monkeypatch.setattr(attention, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or scaled_dot_product_attention(*a, **k))
    q, k, v, *_ = inputs(HEADS, 2, K)
    shaped_attention(q, k, v, **case(kind, K)[0])
    assert len(calls) == (2 if kind in ("bias", "bool by head") else 1)


def test_places_for_the_whole_batch():
    q, k, v, *_ = inputs(HEADS, 2, 3)
    places = torch.tensor([1, 2, 3])
    assert torch.equal(shaped_attention(q, k, v, positions=places), shaped_attention(q, k, v, positions=places[None]))


@pytest.mark.parametrize("causal", [False, True])
def test_lengths_may_vary_after_compilation_and_export(causal):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return shaped_attention(q, k, v, is_causal=causal)

    compiled = torch.compile(Module(), fullgraph=True, dynamic=True, backend="aot_eager")
    length = torch.export.Dim("length", min=2, max=1000)
    example = tuple(torch.randn(1, 2, 70, 4) for _ in range(3))
    exported = torch.export.export(Module(), example, dynamic_shapes=({2: length},) * 3).module()
    for m in (70, 100, 30):
        given = [torch.randn(1, 2, m, 4, generator=generator(m)) for _ in range(3)]
        eager = Module()(*given)
        assert torch.allclose(compiled(*given), eager, atol=1e-5)
        assert torch.allclose(exported(*given), eager, atol=1e-5)


def test_half_precision_does_not_overflow():
    v = torch.full((1, 1, 2048, 8), 40.0).half()
    mask = torch.ones(1, 1, 1, 2048, dtype=torch.bool)
    assert (shaped_attention(0 * v, 0 * v, v, attn_mask=mask) - 40.0).abs().max() < 0.1
    large = torch.full((1, 1, 200, 4), 1100.0).half()
    counts = torch.arange(1, 201)[:, None]
    for found in (running_mean(large, torch.float32), running_mean_by_blocks(large, torch.float32, counts)):
        assert (found - 1100.0).abs().max() <= 1.0


def test_the_future_does_not_reach_back(form):
    v = torch.ones(1, 1, 128, 1)
    v[..., 127, :] = 1e10
    assert torch.allclose(running_mean(v, v.dtype)[..., :127, :], torch.ones(1, 1, 127, 1))


def test_a_single_precision_bias_under_autocast():
    q, k, v, *_ = (x.detach().float() for x in inputs(HEADS, 2, K))
    with torch.autocast("cpu", torch.bfloat16):
        for gain in (0.0, 1.0):
            out = shaped_attention(q, k, v.bfloat16(), attn_mask=torch.zeros(K, K), gamma1=gain, gamma2=gain)
            assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", MASKS)
def test_shapes_without_numbers(kind):
    """On the meta device, where large models are made before they are loaded."""
    q, k, v, gamma1, gamma2 = (x.detach().to("meta") for x in inputs(HEADS, 2, K))
    arguments: Any = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in case(kind, K)[0].items()}
    out = shaped_attention(q, k, v, gamma1=gamma1, gamma2=gamma2, **arguments)
    assert (out.shape, out.device.type) == (q.shape, "meta")


WITHOUT_TYPE_CHECKS = """
import torch
from shaped.nn.functional import shaped_attention
q = torch.zeros(1, 2, 3, 4)
for name, value in {"gamma1": None, "gamma2": "a", "attn_mask": [1], "positions": (0, 1, 2), "q": None}.items():
    try:
        shaped_attention(**{"q": q, "k": q, "v": q} | {name: value})
    except ValueError as error:
        print(name in str(error) and repr(value) in str(error))
"""


def test_what_should_be_a_tensor_or_a_number():
    """In a process of its own, without the type checks of the tests, as users have it."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TYPE_CHECKS], capture_output=True, text=True, check=True)
    assert done.stdout == 5 * "True\n"


def test_gains_and_dropout_are_checked():
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"gamma1": torch.ones(4)}, "gamma1"),
        ({"gamma2": torch.ones(5, 1, 1, 1)}, "gamma2"),
        ({"positions": torch.zeros(5, K, dtype=torch.long)}, "positions"),
        ({"positions": torch.ones(K, dtype=torch.bool)}, "positions"),
        ({"dropout_p": 2.0}, "dropout_p"),
    ]
    for arguments, word in wrong:
        with pytest.raises(ValueError, match=word):
            shaped_attention(Q4, Q4, Q4, **arguments)
