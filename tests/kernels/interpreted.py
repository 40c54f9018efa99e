"""The GPU kernels in Triton's interpreter, which must be enabled before Triton is imported: in a process of its own.

Its argument says which of them, "attention" or "blocks", so that two processes share the work.
"""

import sys
from contextlib import nullcontext
from typing import Any

import torch
from gain_gradients import GAINS, Shape, check_errors, find_relative_errors

from shaped.kernels import attention_correction, chunked_cross_entropy, fused_block, relu_matmul, relu_matmul_hopper, short_attention
from shaped.kernels.fused_block import Block, BlockFunction, Gains, Matrix
from shaped.kernels.long_attention import LongAttention
from shaped.kernels.packed_attention import MixingGains
from shaped.kernels.short_attention import ShortAttention
from shaped.kernels.side_stream import SideStream
from stock_attention import attend_plainly, attend_plainly_backward

torch.cuda.device_of = lambda tensor: nullcontext()  # there is no GPU
relu_matmul_hopper.count_multiprocessors = lambda device: 1


def check_near(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    expected = expected.detach()
    error = float((found.detach().double() - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    assert error < 2e-5, f"{what}: {error}"


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def check_short_attention(
    batch: int, m: int, heads: int, D: int, size: float = 1.0, qk_eps: float | None = None, zero: bool = False
) -> None:
    """Output and gradients against the reference in double precision; `size` of the logits; `zero`: the first token has no length."""
    qkv, do, scale = draw(batch, m, 3 * heads * D), draw(batch, m, heads * D), size * D**-0.5
    qkv[:, : int(zero)] = 0.0
    for shaped in (True, False):
        gamma1, gamma2, gain = (torch.tensor([0.7]), torch.tensor([0.4]), torch.tensor([0.6])) if shaped else (None, None, None)
        exact = [x.double().requires_grad_() for x in (qkv, gamma1, gamma2, gain) if x is not None]
        exact1, exact2, exact_gain = exact[1:] if shaped else (None, None, None)
        expected = short_attention.reference(exact[0], exact1, exact2, heads, scale, exact_gain, qk_eps)
        gradients = torch.autograd.grad(expected, exact, do.double())
        out, stats = short_attention.attend(qkv, gamma1, gamma2, heads, scale, gain, qk_eps)
        dgamma1, dgamma2, dgain = terms = torch.empty(3, stats[0].numel())
        wanted = {"dgamma1": dgamma1, "dgamma2": dgamma2, "gain": gain, "dgain": dgain} if shaped else {}
        dqkv = short_attention.attend_backward(do, qkv, stats, gamma1, gamma2, heads, scale, **wanted, qk_eps=qk_eps)
        case = f"m {m}, D {D}, shaped {shaped}, qk_eps {qk_eps}"
        check_near(out, expected, f"short attention, {case}")
        for name, found, gradient in zip("qkv", dqkv.chunk(3, -1), gradients[0].chunk(3, -1), strict=True):
            check_near(found[:, int(zero) :], gradient[:, int(zero) :], f"its gradient of {name}, {case}")
            check_near(found, gradient, f"its gradient of {name}, with tokens of zero length, {case}")
        for name, found, gradient in zip(("gamma1", "gamma2", "gain"), terms.sum(1, keepdim=True), gradients[1:], strict=False):
            check_near(found, gradient, f"its gradient of {name}, {case}")


def check_cross_entropy(tokens: int, vocab: int, size: float) -> None:
    """Losses and gradients of logits of this size, with ignored labels; a vocabulary that does not fill its last block."""
    logits = size * draw(tokens, vocab)
    labels = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(vocab))
    labels[::3] = chunked_cross_entropy.IGNORED
    expected, gradient = chunked_cross_entropy.compare_logits(logits.double(), labels, True)
    losses, found = chunked_cross_entropy.compare_in_kernel(logits.clone(), labels, True)
    check_near(losses, expected, f"cross-entropy, vocabulary {vocab}")
    check_near(found, gradient, f"its gradient, vocabulary {vocab}")
    losses, kept = chunked_cross_entropy.compare_in_kernel(logits, labels, False)
    check_near(losses, expected, f"cross-entropy without gradient, vocabulary {vocab}")
    assert kept is logits


def check_correction(m: int, causal: bool, transposed: bool, groups: int) -> None:
    """y + gamma1 x - gamma2 R x, or with R transposed and the heads of a group added, against matrices."""
    heads, D = 4, 16
    few, many = (2, heads // groups, m, D), (2, heads, m, D)
    y, x, v = (draw(*shape) for shape in ((few, many, few) if transposed else (many, few, few)))
    one, two = draw(heads), draw(heads + 1)[1:]
    R = torch.ones(m, m, dtype=torch.float64)
    R = R.tril() if causal else R
    R = R / R.sum(-1, keepdim=True)
    out = torch.empty_like(y)
    blocks, gain = attention_correction.count_blocks(m), torch.tensor([0.6]) if groups == 1 else None
    terms, dgain = (torch.empty(2, 2 * heads * blocks), torch.empty(2 * y.shape[1] * blocks)) if transposed else (None, None)
    attention_correction.correct(y, out, x, v, one, two, 0.5, 2.0, causal, transposed, gain, terms, dgain)
    factor = 1.0 if gain is None else float(gain)
    gamma1, gamma2 = (0.5 * one).double()[:, None, None], (2.0 * two).double()[:, None, None]
    if transposed:
        centring = R.T @ x.double()
        expected = y + (gamma1 * x - gamma2 * centring).unflatten(1, (-1, groups)).sum(2)
        values = v.double().repeat_interleave(groups, 1)
        assert terms is not None
        assert dgain is not None
        dgamma = terms.view(2, 2, heads, blocks).sum((1, 3)) / factor
        for found, part in zip(dgamma, ((x * values).sum((0, 2, 3)), -(centring * values).sum((0, 2, 3))), strict=True):
            for head in range(heads):
                check_near(found[head], part[head], f"gain of head {head}, m {m}, causal {causal}")
        check_near(dgain.sum(), (expected * v).sum(), f"gain of all, m {m}, causal {causal}")
    else:
        values = x.double().repeat_interleave(groups, 1)
        expected = y + gamma1 * values - gamma2 * (R @ values)
    check_near(out, factor * expected, f"identity and centring, m {m}, causal {causal}, transposed {transposed}, groups {groups}")


def check_long_attention(m: int, heads: int, D: int, qk_eps: float | None, causal: bool, rotations: int, qk_gain: bool = False) -> None:
    """Output and gradients against the reference in double precision. `rotations`: 0, one for all sequences, or one for each."""
    batch = 2
    qkv, do = draw(batch, m, 3 * heads * D), draw(batch, m, heads * D)
    angles = 3.0 * draw(max(rotations, 1), m, D // 2).double()
    exact_rotation = (angles.cos(), angles.sin()) if rotations else None
    rotation = (angles.cos().float(), angles.sin().float()) if rotations else None
    vectors = [1.0 + 0.5 * draw(D), 1.0 - 0.3 * draw(D + 1)[1:]] if qk_gain else []
    gains = MixingGains(*(torch.tensor([value]) for value in (0.7, 0.4, 0.6)), *vectors)
    exact = [x.double().requires_grad_() for x in (qkv, *gains) if x is not None]
    expected = LongAttention(heads, 0.3, qk_eps, causal, exact_rotation).reference(exact[0], MixingGains(*exact[1:]))
    gradients = torch.autograd.grad(expected, exact, do.double())
    attention = LongAttention(heads, 0.3, qk_eps, causal, rotation)
    out, saved = attention.attend(qkv, gains)
    few, many = attention.count_terms(qkv)
    terms: MixingGains[Any] = MixingGains(
        *torch.empty(3, few), *(torch.empty(D, many + 3)[:, :many] for _ in vectors)
    )  # rows may be longer
    dqkv = attention.attend_backward(do, qkv, saved, gains, terms)
    case = f"m {m}, D {D}, qk_eps {qk_eps}, causal {causal}, rotations {rotations}, qk_gain {qk_gain}"
    check_near(out, expected, f"long attention, {case}")
    for name, found, gradient in zip("qkv", dqkv.chunk(3, -1), gradients[0].chunk(3, -1), strict=True):
        check_near(found, gradient, f"its gradient of {name}, {case}")
    for name, found, gradient in zip(MixingGains._fields, terms, gradients[1:], strict=False):
        assert found is not None
        check_near(found.sum(-1).view_as(gradient), gradient, f"its gradient of {name}, {case}")


def check_relu_matmul(rows: int, width: int, hidden: int) -> None:
    """Outputs, gradients and gains' gradients of both modules against the reference, in tiles that are not full."""
    x, weight, back, g = draw(rows, width), draw(hidden, width), draw(width, hidden), draw(rows, width)
    slope, gamma = torch.tensor([0.3]), torch.tensor([0.7])
    exact_slope, exact_gamma = (gain.double().requires_grad_() for gain in (slope, gamma))
    identity, exact_hidden = torch.eye(hidden, dtype=torch.float64), (x.double() @ weight.double().mT).requires_grad_()
    exact_activated = relu_matmul.reference(exact_hidden, identity, exact_slope)
    y = exact_gamma * exact_activated @ back.double().mT
    expected, *gains = torch.autograd.grad(y, (exact_hidden, exact_gamma, exact_slope), g.double())
    for module in (relu_matmul, relu_matmul_hopper):
        for keep_hidden in (True, False):
            activated, kept = module.matmul_relu(x, weight, slope, keep_hidden)
            check_near(activated, exact_activated, f"{module.__name__}: activated")
            check_near(kept, exact_hidden if keep_hidden else exact_activated, f"{module.__name__}: hidden")
            terms = torch.zeros(2, module.count_programs(kept))
            slope_terms = terms[1] if keep_hidden else None
            found = module.matmul_relu_backward(g, back, kept, not keep_hidden, slope, gamma, terms[0], slope_terms)
            check_near(found, expected, f"{module.__name__}: gradient")
            check_near(terms[0].sum(), gains[0][0], f"{module.__name__}: gradient of gamma")
            if keep_hidden:
                check_near(terms[1].sum(), gains[1][0], f"{module.__name__}: gradient of slope")


def check_block(attention: ShortAttention | LongAttention, exact_attention: ShortAttention | LongAttention) -> None:
    """Tokens of the fused block, and gradients of tokens and weights."""
    n, case = 16 * 3, type(attention).__name__
    sizes = {"qkv": (3 * n, n), "output": (n, n), "pre": (96, n), "post": (n, 96)}
    weights = {name: draw(*size) / size[1] ** 0.5 for name, size in sizes.items()}
    settings: dict[str, Any] = {"side_stream": SideStream(), "last": True}
    written = {name: Matrix(weight, torch.empty_like(weight)) for name, weight in weights.items()}
    exact = {name: Matrix(weight.double().requires_grad_(), weight) for name, weight in weights.items()}
    gains, x, dy = (
        [None if gain is None else torch.tensor([gain]) for gain in GAINS],
        draw(2, 20, n).requires_grad_(),
        draw(2, 20, n + 1)[..., 1:],
    )
    y: Any = BlockFunction.apply(x, None, Block(**written, **settings, attention=attention), *gains)
    y.backward(dy)
    start = x.detach().double().requires_grad_()
    expected = fused_block.reference(
        start, None, Block(**exact, **settings, attention=exact_attention), *(gain if gain is None else gain.double() for gain in gains)
    )
    expected.backward(dy.double())
    assert x.grad is not None
    assert start.grad is not None
    check_near(y, expected, f"tokens of a block, {case}")
    check_near(x.grad, start.grad, f"their gradient, {case}")
    for name, matrix in exact.items():
        assert matrix.weight.grad is not None
        check_near(written[name].gradient, matrix.weight.grad, f"gradient of {name}, {case}")


def check_gains() -> None:
    """Each gain of the fused block, in half precision. The interpreter cannot multiply matrices in bfloat16."""
    learned = Gains(*[True] * 7)
    # Attention and feed-forward kernels have nothing in common.
    for module, heads, qk_eps, causal in (
        (relu_matmul, 2, 1e-6, False),
        (relu_matmul_hopper, 2, None, False),
        (relu_matmul, 3, 1e-6, True),
    ):
        fused_block.choose_relu_matmul = lambda x, weight, module=module: module
        shape = Shape(batch=2, m=20, width=48, heads=heads, kept=8, qk_eps=qk_eps, causal=causal)
        generator = torch.Generator().manual_seed(130)
        errors = torch.stack([find_relative_errors(shape, "cpu", torch.float16, learned, generator) for _ in range(4)])
        check_errors(errors, torch.float16)


def check_attention_kernels() -> None:
    for batch, m, heads, D in ((2, 1, 1, 8), (2, 17, 3, 24), (1, 128, 2, 96)):
        check_short_attention(batch, m, heads, D)
    check_short_attention(1, 17, 1, 24, size=1e3)
    for batch, m, heads, D in ((2, 1, 1, 8), (2, 17, 3, 24), (1, 70, 1, 40), (1, 128, 1, 96)):
        check_short_attention(batch, m, heads, D, size=3.0, qk_eps=0.3)
    check_short_attention(1, 17, 1, 24, qk_eps=0.0)
    check_short_attention(1, 17, 1, 24, qk_eps=1e-6, zero=True)
    for m in (1, 130):  # 130 has whole blocks and one that is not full
        for causal in (False, True):
            for transposed, groups in ((False, 1), (False, 2), (True, 1), (True, 2)):
                check_correction(m, causal, transposed, groups)
    check_long_attention(70, 3, 16, 0.3, True, 2, qk_gain=True)
    check_long_attention(70, 2, 16, 0.0, False, 0, qk_gain=True)
    for m, heads, D, qk_eps, causal, rotations in (
        (1, 1, 16, 0.3, True, 1),
        (70, 3, 16, 0.3, True, 2),
        (130, 1, 32, 1e-6, True, 1),
        (70, 2, 16, 0.0, False, 0),
        (17, 2, 16, None, True, 1),
        (17, 2, 16, None, True, 0),
    ):
        check_long_attention(m, heads, D, qk_eps, causal, rotations)


def check_block_kernels() -> None:
    check_relu_matmul(1180, 72, 200)
    check_block(ShortAttention(2, 0.5, 0.3), ShortAttention(2, 0.5, 0.3))
    angles = draw(1, 20, 8).double()
    check_block(
        LongAttention(3, 0.5, 0.3, True, (angles.cos().float(), angles.sin().float())),
        LongAttention(3, 0.5, 0.3, True, (angles.cos(), angles.sin())),
    )
    for vocab, size in ((7, 1.0), (4096, 30.0), (5000, 1e3)):
        check_cross_entropy(5, vocab, size)
    check_gains()


attention_correction.attend, attention_correction.attend_backward = attend_plainly, attend_plainly_backward
{"attention": check_attention_kernels, "blocks": check_block_kernels}[sys.argv[1]]()
print("all near")
