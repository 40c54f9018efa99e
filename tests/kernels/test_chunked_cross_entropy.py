"""Chunked cross-entropy against the plain one: losses and gradients, in every precision, compiled or not."""

import pytest
import torch
from torch import Tensor

from shaped.kernels.chunked_cross_entropy import IGNORED, LOGITS, choose_chunk, cross_entropy_op, reference, sum_cross_entropy


def draw(dtype: torch.dtype, tokens: int = 37, vocab: int = 11, n: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, matrix, labels, of which every fifth is ignored."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, n, generator=generator).to(dtype).requires_grad_() for rows in (tokens, vocab))
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[::5] = IGNORED
    return x, weight, labels


@pytest.mark.parametrize("chunk", [1, 10, 37, 64])
def test_it_is_the_plain_one(chunk: int):
    """Chunks that divide the tokens and chunks that do not, and an upstream gradient that is not 1."""
    x, weight, labels = draw(torch.float64)
    expected, found = (total / 7 for total in (reference(x, weight, labels), sum_cross_entropy(x, weight, labels, chunk=chunk)))
    assert abs(found - expected) < 1e-12
    for one, other in zip(torch.autograd.grad(found, (x, weight)), torch.autograd.grad(expected, (x, weight)), strict=True):
        assert (one - other).abs().max() < 1e-12
    with torch.no_grad():
        assert abs(sum_cross_entropy(x, weight, labels, chunk=chunk) / 7 - expected) < 1e-12


def test_a_gradient_in_place_is_that_of_autograd():
    x, weight, labels = draw(torch.float64)
    expected = torch.autograd.grad(reference(x, weight, labels) / 7, (x, weight))
    buffer = torch.full_like(weight, torch.nan)  # it is overwritten, not added to
    found = torch.autograd.grad(sum_cross_entropy(x, weight.detach(), labels, buffer.data, chunk=10) / 7, x)
    assert (found[0] - expected[0]).abs().max() < 1e-12
    assert (buffer - expected[1]).abs().max() < 1e-12


@pytest.mark.parametrize("in_place", [False, True])
def test_bfloat16_is_within_its_roundings(in_place: bool):
    """Logits and their gradients are rounded to 2^-9; sums are in float32. A gradient in place is written in bfloat16."""
    x, weight, labels = draw(torch.float32, tokens=500, vocab=50, n=32)
    expected = reference(x, weight, labels) / 400
    gradients = torch.autograd.grad(expected, (x, weight))
    if in_place:
        half = weight.detach().bfloat16()
        buffer = torch.zeros_like(half)
        found = sum_cross_entropy(x, half, labels, buffer.data, chunk=128) / 400
        others = (*torch.autograd.grad(found, x), buffer)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            found = sum_cross_entropy(x, weight, labels, chunk=128) / 400
        others = torch.autograd.grad(found, (x, weight))
        assert [other.dtype for other in others] == [torch.float32] * 2
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=2**-8)
    for one, other in zip(others, gradients, strict=True):
        assert (one - other).norm() < 2**-6 * other.norm()


def test_all_labels_ignored_is_zero_without_nan():
    x, weight, labels = draw(torch.float32)
    total = sum_cross_entropy(x, weight, torch.full_like(labels, IGNORED), chunk=10)
    assert total.item() == 0.0
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(total, (x, weight)))


def test_it_compiles_whole():
    x, weight, labels = draw(torch.float32)
    buffer = torch.zeros_like(weight)
    compiled = torch.compile(
        lambda x: sum_cross_entropy(x, weight.detach(), labels, buffer.data, 10) / 7, backend="aot_eager", fullgraph=True
    )
    expected = torch.autograd.grad(reference(x, weight, labels) / 7, (x, weight))
    found = torch.autograd.grad(compiled(x), x)
    assert (found[0] - expected[0]).abs().max() < 1e-6
    assert (buffer - expected[1]).abs().max() < 1e-6
    torch.library.opcheck(
        cross_entropy_op,
        (x, weight, labels, None, 10, True, True),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize("vocab", [2, 32_000, 50_257, 128_256, 10**9])
def test_a_chunks_logits_are_bounded(vocab: int):
    chunk = choose_chunk(vocab)
    assert chunk >= 128
    assert chunk & (chunk - 1) == 0
    assert chunk == 128 or LOGITS / 2 < chunk * vocab <= LOGITS
