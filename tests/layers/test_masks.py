"""Biases on the logits: what is accepted, what is kept, and ALiBi's numbers for every number of heads."""

import math

import pytest
import torch

import shaped
from refusals import refused


def authors_slopes(heads: int) -> list[float]:
    """The slopes as the authors of ALiBi compute them, by recursion (Press, Smith and Lewis 2022, their published code)."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return authors_slopes(below) + authors_slopes(2 * below)[0::2][: heads - below]


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 7, 16])
def test_alibi(heads):
    bias = shaped.alibi(3, heads)
    assert bias.shape == (heads, 3, 3)
    assert bias.dtype == torch.float64
    for of_head, slope in zip(bias.tolist(), authors_slopes(heads), strict=True):
        expected = [[0.0, -math.inf, -math.inf], [-slope, 0.0, -math.inf], [-2 * slope, -slope, 0.0]]
        assert [x for row in of_head for x in row] == pytest.approx([x for row in expected for x in row], rel=1e-14)


def test_one_token_has_alibi_too():
    assert shaped.alibi(1, 2).tolist() == [[[0.0]], [[0.0]]]
    with refused("heads", "0"):
        shaped.alibi(3, 0)


@pytest.mark.parametrize(
    ("mask", "heads", "words"),
    [
        (torch.zeros(3), 1, ["mask", "square", "(3,)"]),
        (torch.zeros(1, 1, 3, 3), 1, ["mask", "square", "(1, 1, 3, 3)"]),
        (torch.zeros(2, 3, 2), 2, ["mask", "square", "(2, 3, 2)"]),
        (torch.zeros(2, 3, 3), 1, ["mask", "1 heads", "(2, 3, 3)"]),
        (torch.full((2, 2), math.nan), 1, ["mask", "nan"]),
        (torch.tensor([[0.0, math.inf], [0.0, 0.0]]), 1, ["mask", "+inf"]),
        (torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [-math.inf, -math.inf]]]), 2, ["mask", "row 1"]),
        ("Causal", 1, ["mask", "Causal"]),
    ],
)
def test_masks_that_are_refused(mask, heads, words):
    with refused(*words):
        shaped.ShapedAttention(0.5, heads=heads, mask=mask)


def test_masks_are_kept_as_double_precision_copies():
    given = torch.zeros(2, 2, dtype=torch.float16)
    kept = shaped.ShapedAttention(0.5, mask=given).mask
    assert isinstance(kept, torch.Tensor)
    assert kept.dtype == torch.float64
    allowed = torch.tensor([[True, False], [True, True]])
    kept = shaped.ShapedAttention(0.5, mask=allowed).mask
    assert isinstance(kept, torch.Tensor)
    assert kept.tolist() == [[0.0, -math.inf], [0.0, 0.0]]
    allowed.fill_(False)
    trained = torch.zeros(2, 2, requires_grad=True)
    layer = shaped.ShapedAttention(0.5, mask=trained)
    assert isinstance(layer.mask, torch.Tensor)
    assert not layer.mask.requires_grad
    with torch.no_grad():
        trained.fill_(3.0)
    assert layer.mask.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_terms_of_different_masks_stay_apart():
    bias = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    masks = {"none": None, "causal": "causal", "bias": bias, "other": bias.mT}
    for one in masks:
        for other in masks:
            both = shaped.ShapedAttention(0.5, mask=masks[one]) >> shaped.ShapedAttention(0.5, mask=masks[other])
            assert len(both.terms) == (2 if one == other else 3)
    equal = "".join(["cau", "sal"])  # another object than the literal
    assert len((shaped.ShapedAttention(0.5, mask="causal") >> shaped.ShapedAttention(0.5, mask=equal)).terms) == 2


def test_layers_are_shown_by_what_is_not_the_default():
    assert repr(shaped.ShapedAttention(0.5)) == "ShapedAttention(gamma=0.5)"
    assert (
        repr(shaped.ShapedAttention(0.5, heads=2, mask=shaped.alibi(3, 2))) == "ShapedAttention(gamma=0.5, heads=2, mask=<2 x 3 x 3 bias>)"
    )
    assert repr(shaped.ShapedAttention(0.5, mask="causal", project=True)) == "ShapedAttention(gamma=0.5, project=True, mask='causal')"
