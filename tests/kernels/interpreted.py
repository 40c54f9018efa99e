"""The GPU kernels in Triton's interpreter, which must be enabled before Triton is imported: in a process of its own."""

from contextlib import nullcontext
from typing import Any

import torch
from gain_gradients import GAINS, Shape, check_errors, find_relative_errors

from shaped.kernels import attention_correction, chunked_cross_entropy, fused_block, relu_matmul, relu_matmul_hopper, short_attention
from shaped.kernels.fused_block import Block, BlockFunction, Gains, Matrix
from shaped.kernels.side_stream import SideStream

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
    dgamma = attention_correction.correct(y, out, x, v, one, two, 0.5, 2.0, causal, transposed, gains=transposed)
    gamma1, gamma2 = (0.5 * one).double()[:, None, None], (2.0 * two).double()[:, None, None]
    if transposed:
        centring = R.T @ x.double()
        expected = y + (gamma1 * x - gamma2 * centring).unflatten(1, (-1, groups)).sum(2)
        values = v.double().repeat_interleave(groups, 1)
        assert dgamma is not None
        for found, part in zip(dgamma.T, ((x * values).sum((0, 2, 3)), -(centring * values).sum((0, 2, 3))), strict=True):
            for head in range(heads):
                check_near(found[head], part[head], f"gain of head {head}, m {m}, causal {causal}")
    else:
        values = x.double().repeat_interleave(groups, 1)
        expected = y + gamma1 * values - gamma2 * (R @ values)
    check_near(out, expected, f"identity and centring, m {m}, causal {causal}, transposed {transposed}, groups {groups}")


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


def check_block(qk_eps: float | None) -> None:
    """Tokens of the fused block, and gradients of tokens and weights."""
    n, heads = 48, 2
    sizes = {"qkv": (3 * n, n), "output": (n, n), "pre": (96, n), "post": (n, 96)}
    weights = {name: draw(*size) / size[1] ** 0.5 for name, size in sizes.items()}
    settings: dict[str, Any] = {"heads": heads, "scale": 0.5, "side_stream": SideStream(), "last": True, "qk_eps": qk_eps}
    written = {name: Matrix(weight, torch.empty_like(weight)) for name, weight in weights.items()}
    exact = {name: Matrix(weight.double().requires_grad_(), weight) for name, weight in weights.items()}
    gains, x, dy = [torch.tensor([gain]) for gain in GAINS], draw(2, 20, n).requires_grad_(), draw(2, 20, n + 1)[..., 1:]
    y: Any = BlockFunction.apply(x, None, Block(**written, **settings), *gains)
    y.backward(dy)
    start = x.detach().double().requires_grad_()
    expected = fused_block.reference(start, None, Block(**exact, **settings), *(gain.double() for gain in gains))
    expected.backward(dy.double())
    assert x.grad is not None
    assert start.grad is not None
    check_near(y, expected, f"tokens of a block, qk_eps {qk_eps}")
    check_near(x.grad, start.grad, f"their gradient, qk_eps {qk_eps}")
    for name, matrix in exact.items():
        assert matrix.weight.grad is not None
        check_near(written[name].gradient, matrix.weight.grad, f"gradient of {name}, qk_eps {qk_eps}")


def check_gains() -> None:
    """Each gain of the fused block, in half precision. The interpreter cannot multiply matrices in bfloat16."""
    learned = Gains(*[True] * 7)
    for module, qk_eps in ((relu_matmul, 1e-6), (relu_matmul_hopper, None)):  # QK-norm and the feed-forward kernels have nothing in common
        fused_block.choose_relu_matmul = lambda x, weight, module=module: module
        shape, generator = Shape(batch=2, m=20, width=48, heads=2, kept=8, qk_eps=qk_eps), torch.Generator().manual_seed(130)
        errors = torch.stack([find_relative_errors(shape, "cpu", torch.float16, learned, generator) for _ in range(4)])
        check_errors(errors, torch.float16)


for batch, m, heads, D in ((2, 1, 1, 8), (2, 17, 3, 24), (1, 128, 2, 96)):
    check_short_attention(batch, m, heads, D)
check_short_attention(1, 17, 1, 24, size=1e3)
for batch, m, heads, D in ((2, 1, 1, 8), (2, 17, 3, 24), (1, 70, 1, 40), (1, 128, 1, 96)):
    check_short_attention(batch, m, heads, D, size=3.0, qk_eps=0.3)
check_short_attention(2, 17, 3, 24, qk_eps=0.0)
check_short_attention(2, 17, 3, 24, qk_eps=1e-6, zero=True)
for m in (1, 70, 130):
    for causal in (False, True):
        for transposed, groups in ((False, 1), (False, 2), (True, 1), (True, 2)):
            check_correction(m, causal, transposed, groups)
check_relu_matmul(1180, 72, 200)
check_block(0.3)
for vocab, size in ((7, 1.0), (4096, 30.0), (5000, 1e3)):
    check_cross_entropy(5, vocab, size)
check_gains()
print("all near")
