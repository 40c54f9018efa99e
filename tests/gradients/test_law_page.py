"""docs/gradients.md says what docs/results has."""

import pytest
from law_page import MARKED, PAGE, describe, read_result, rewrite

FOUND = {"D": 0.0042, "p": 0.3}
RESULT = {
    "networks": 100_000,
    "seconds": 200.0,
    "environment": {"device": "a device"},
    "wrong": ["shaped, loss: p = 1e-09", "independent, shaped: accepted, D = 0.0040 (tokens 0)"],
    "summary": {
        "distances": 1440,
        "correlations": 3000,
        "rejected below p": 2.3e-6,
        "band of D": 0.0117,
        "largest D": {"where": "shaped, loss"} | FOUND,
        "p-values of D in ten bins": [144] * 10,
        "mean z of correlations": 0.01,
        "root mean square z of correlations": 1.02,
        "largest z of correlations": {"where": "shaped, query 0, loss", "z": -3.4, "autograd": 0.5, "law": 0.51},
    },
    "settings": [
        {"block": "shaped", "loss": "squared error", "ks": {"loss": FOUND}}
        | {name: {"name": "tokens 0", "D": 0.0401} for name in ("gamma 5 % off", "independent")},
        {"block": "Pre-LN", "loss": "squared error", "ks": {"loss": FOUND}},
    ],
    "independent": [{"n": 8, "d": 6, "tokens 0": {name: [0.25, 0.24, 0.26] for name in ("D", "mean difference", "spread ratio")}}],
}


def test_page_says_what_the_result_has():
    page = PAGE.read_text()
    assert MARKED.search(page)
    assert rewrite(page, read_result()) == page


@pytest.mark.parametrize(
    "part",
    [
        "100,000 networks of each kind at each of 2 settings, 200 s on a device",
        "below 2e-06, which is a D above 0.0117.\nOutside of that band: 1.\n",
        "| shaped | squared error | 0.0042 | 0.0401 (tokens 0) | 0.0401 (tokens 0) |\n\n",
        "| 8 | 6 | 0.250 (0.240 to 0.260) | 0.250 (0.240 to 0.260) |",
    ],
)
def test_page_has_the_numbers_of_a_result(part):
    assert part in describe(RESULT)
