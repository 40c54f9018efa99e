"""README.md and docs/figures.md say of the claims what docs/results has, and that is by the one rule."""

import json
from pathlib import Path

import pytest

from programs import load_program
from refusals import refused
from shaped.figures.harness.claims import count, verdict
from shaped.figures.harness.reproduce import FIGURES, TRAINED

ROOT = Path(__file__).parents[2]


def tool():
    return load_program("claims")


@pytest.mark.parametrize(("scale", "ids"), [("paper", FIGURES + TRAINED), ("quick", FIGURES)])
def test_all_committed_verdicts_are_by_the_one_rule(scale, ids):
    about = json.loads((ROOT / "docs" / "results" / f"reproduce-{scale}.json").read_text())
    rows = [row for figure in about["figures"] for row in figure["claims"]]
    assert [figure["figure"] for figure in about["figures"]] == list(ids)
    for row in rows:
        assert row["verdict"] == verdict(row["interval"], row["relation"], row["threshold"]), row["id"]
    assert (about["claims"], about["verdicts"]) == (len(rows), count(rows))


@pytest.mark.parametrize("page", ["README.md", "docs/figures.md"])
def test_pages_say_what_the_results_have(page):
    """`python benchmarks/claims.py` makes them do so."""
    made, text = tool(), (ROOT / page).read_text()
    assert made.rewritten(text) == text
    assert made.rewritten(text.replace("holds 1", "holds 2")) == text


def test_every_figure_with_claims_has_its_table():
    names = {match[1] for match in tool().MARKED.findall((ROOT / "docs" / "figures.md").read_text())}
    assert names == {*FIGURES, "fig6", "table1", "paper figures", "quick run"}  # table2 has no claims


def test_a_folder_without_figures_is_refused(tmp_path):
    with refused("folders", str(tmp_path)):
        tool().collect([tmp_path])
