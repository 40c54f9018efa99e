"""The fields of the page: bounds of each, what fits together, and the question that comes out."""

import pytest

from shaped.commands.blocks import BlockSettings
from shaped.explore.fields import FIELDS, Refused, describe_fields, parse_question

NUMBERS = [field for field in FIELDS if field.kind in ("whole", "real")]


@pytest.mark.parametrize("field", NUMBERS, ids=lambda field: field.name)
def test_a_field_takes_its_bounds_and_nothing_beyond(field):
    assert field.parse(str(field.low)) == field.low
    assert field.parse(str(field.high)) == field.high
    assert field.low <= field.default <= field.high
    step = 1 if field.kind == "whole" else 1e-6
    for text in (str(field.low - step), str(field.high + step), "nan", "inf", "1e999", "", "x", "1;2"):
        with pytest.raises(Refused, match=rf"^{field.name} must be .* got ") as error:
            field.parse(text)
        assert error.value.name == field.name
        assert "\n" not in str(error.value)


def test_a_choice_and_a_switch_take_only_their_words():
    assert parse_question({"mask": "causal", "qk_norm": "true"}).values["qk_norm"] is True
    for name, text in (("mask", "alibi"), ("qk_norm", "1"), ("qk_norm", "True")):
        with pytest.raises(Refused, match=f"^{name} must be .* got '{text}'$"):
            parse_question({name: text})


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"width": "200", "heads": "3"}, "heads"),
        ({"width": "8", "tokens": "9", "depth": "1"}, "width"),
        ({"width": "8", "depth": "65"}, "depth"),
        ({"width": "512", "depth": "512", "heads": "8"}, "heads"),
        ({"width": "4096", "depth": "512", "tokens": "9"}, "tokens"),
        ({"wisdom": "1"}, "wisdom"),
    ],
)
def test_what_does_not_fit_together_names_a_field(values, field):
    with pytest.raises(Refused, match=r"must be|must divide") as error:
        parse_question(values)
    assert error.value.name == field


def test_the_defaults_are_those_of_the_first_figure():
    asked, usual = parse_question({}), BlockSettings()
    for name in ("tokens", "gamma", "tau0", "c_plus", "c_minus", "rho", "heads", "qk_norm"):
        assert getattr(asked, name) == getattr(usual, name)
    assert (asked.width, asked.depth, asked.mask, asked.project) == (200, 150, "none", False)


def test_the_form_says_everything_that_the_page_needs():
    keys = {"name", "symbol", "label", "kind", "low", "high", "scale", "step", "default", "choices", "help"}
    assert all(set(field) - {"multiple_of", "divides"} == keys for field in describe_fields())
    assert [field["name"] for field in describe_fields()] == list(parse_question({}).values)
