"""The GPU kernels in Triton's interpreter, which wants to be asked for before Triton is imported: so in a process of its own."""

from contextlib import nullcontext

import torch

from shaped.kernels.gpu import attention_correction as kernels
from shaped.kernels.gpu import short_attention as short_kernels

torch.cuda.device = torch.cuda.device_of = lambda where: nullcontext()  # there is none


def near(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    expected = expected.detach()
    error = float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    assert error < 2e-5, f"{what}: {error}"


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def check_short(batch: int, m: int, heads: int, D: int, size: float = 1.0) -> None:
    """Output and gradients against autograd in double precision; `size` of the logits."""
    qkv, do, scale = numbers(batch, m, 3 * heads * D), numbers(batch, m, heads * D), size * D**-0.5
    for shaped in (True, False):
        one, two = (torch.tensor([0.7]), torch.tensor([0.4])) if shaped else (None, None)
        exact = [x.double().requires_grad_() for x in (qkv, one, two) if x is not None]
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in exact[0].chunk(3, -1))
        expected = torch.softmax(q @ k.mT * scale, -1) @ v
        if shaped:
            expected = expected + exact[1] * v - exact[2] * v.mean(-2, keepdim=True)
        expected = expected.transpose(1, 2).flatten(-2)
        gradients = torch.autograd.grad(expected, exact, do.double())
        out, lse = short_kernels.forward(qkv, one, two, heads, scale)
        dgamma = torch.empty(2, lse.numel())
        dqkv = short_kernels.backward(do, qkv, lse, one, two, heads, scale, *(dgamma if shaped else ()))
        near(out, expected, f"short attention, m {m}, D {D}, shaped {shaped}")
        near(dqkv, gradients[0], f"its gradients, m {m}, D {D}, shaped {shaped}")
        if shaped:
            near(dgamma.sum(1), torch.cat(gradients[1:]), f"its gains' gradients, m {m}, D {D}")


def check_correct(m: int, causal: bool, transposed: bool, groups: int) -> None:
    """y + gamma1 x - gamma2 R x, or with R transposed and the heads of a group added, against matrices."""
    heads, D = 4, 16
    few, many = (2, heads // groups, m, D), (2, heads, m, D)
    y, x, v = (numbers(*shape) for shape in ((few, many, few) if transposed else (many, few, few)))
    one, two = numbers(heads), numbers(heads + 1)[1:]
    R = torch.ones(m, m, dtype=torch.float64)
    R = R.tril() if causal else R
    R = R / R.sum(-1, keepdim=True)
    out = torch.empty_like(y)
    dgamma = kernels.correct(y, out, x, v, one, two, 0.5, 2.0, causal, transposed, gains=transposed)
    gamma1, gamma2 = (0.5 * one).double()[:, None, None], (2.0 * two).double()[:, None, None]
    if transposed:
        rest = R.T @ x.double()
        expected = y + (gamma1 * x - gamma2 * rest).unflatten(1, (-1, groups)).sum(2)
        values = v.double().repeat_interleave(groups, 1)
        assert dgamma is not None
        near(dgamma, torch.stack([(x * values).sum((0, 2, 3)), -(rest * values).sum((0, 2, 3))], 1), f"gains, m {m}, causal {causal}")
    else:
        values = x.double().repeat_interleave(groups, 1)
        expected = y + gamma1 * values - gamma2 * (R @ values)
    near(out, expected, f"identity and centring, m {m}, causal {causal}, transposed {transposed}, groups {groups}")


for batch, m, heads, D in ((2, 1, 1, 8), (2, 17, 3, 24), (1, 128, 2, 96)):
    check_short(batch, m, heads, D)
check_short(1, 17, 1, 24, size=1e3)
for m in (1, 70, 130):
    for causal in (False, True):
        for transposed, groups in ((False, 1), (False, 2), (True, 1), (True, 2)):
            check_correct(m, causal, transposed, groups)
print("all near")
