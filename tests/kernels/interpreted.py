"""The GPU kernels in Triton's interpreter, which must be enabled before Triton is imported: in a process of its own."""

from contextlib import nullcontext

import torch
from gain_gradients import Shape, check_errors, find_relative_errors

from shaped.kernels import attention_correction, chunked_cross_entropy, fused_block, relu_matmul, relu_matmul_hopper, short_attention
from shaped.kernels.fused_block import Gains

torch.cuda.device_of = lambda tensor: nullcontext()  # there is no GPU
relu_matmul_hopper.count_multiprocessors = lambda device: 1


def check_near(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    expected = expected.detach()
    error = float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    assert error < 2e-5, f"{what}: {error}"


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def check_short_attention(batch: int, m: int, heads: int, D: int, size: float = 1.0) -> None:
    """Output and gradients against the reference in double precision; `size` of the logits."""
    qkv, do, scale = draw(batch, m, 3 * heads * D), draw(batch, m, heads * D), size * D**-0.5
    for shaped in (True, False):
        gamma1, gamma2 = (torch.tensor([0.7]), torch.tensor([0.4])) if shaped else (None, None)
        exact = [x.double().requires_grad_() for x in (qkv, gamma1, gamma2) if x is not None]
        exact1, exact2 = exact[1:] if shaped else (None, None)
        expected = short_attention.reference(exact[0], exact1, exact2, heads, scale)
        gradients = torch.autograd.grad(expected, exact, do.double())
        out, lse = short_attention.attend(qkv, gamma1, gamma2, heads, scale)
        dgamma = torch.empty(2, lse.numel())
        dqkv = short_attention.attend_backward(do, qkv, lse, gamma1, gamma2, heads, scale, *(dgamma if shaped else ()))
        check_near(out, expected, f"short attention, m {m}, D {D}, shaped {shaped}")
        check_near(dqkv, gradients[0], f"its gradients, m {m}, D {D}, shaped {shaped}")
        for name, found, gradient in zip(("gamma1", "gamma2"), dgamma.sum(1, keepdim=True), gradients[1:], strict=False):
            check_near(found, gradient, f"its gradient of {name}, m {m}, D {D}")


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


def check_gains() -> None:
    """Each gain of the fused block, in half precision. The interpreter cannot multiply matrices in bfloat16."""
    learned, shape = Gains(*[True] * 7), Shape(batch=2, m=20, width=48, heads=2, kept=8)
    for module in (relu_matmul, relu_matmul_hopper):
        fused_block.choose_relu_matmul = lambda x, weight, module=module: module
        generator = torch.Generator().manual_seed(130)
        errors = torch.stack([find_relative_errors(shape, "cpu", torch.float16, learned, generator) for _ in range(4)])
        check_errors(errors, torch.float16)


for batch, m, heads, D in ((2, 1, 1, 8), (2, 17, 3, 24), (1, 128, 2, 96)):
    check_short_attention(batch, m, heads, D)
check_short_attention(1, 17, 1, 24, size=1e3)
for m in (1, 70, 130):
    for causal in (False, True):
        for transposed, groups in ((False, 1), (False, 2), (True, 1), (True, 2)):
            check_correction(m, causal, transposed, groups)
check_relu_matmul(1180, 72, 200)
for vocab, size in ((7, 1.0), (4096, 30.0), (5000, 1e3)):
    check_cross_entropy(5, vocab, size)
check_gains()
print("all near")
