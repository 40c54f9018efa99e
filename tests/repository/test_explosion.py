"""The table of exploding paths in docs/method.md is what benchmarks/explosion.py measured."""

import json
import re
from pathlib import Path

from shaped.intervals import format_share

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_has_the_measured_shares():
    measured = json.loads((DOCS / "results" / "explosion.json").read_text())
    page = (DOCS / "method.md").read_text()
    table = page[page.index("| without QK-norm | with QK-norm |") :]
    found = re.findall(r"[\d.]+ % \([\d.]+ to [\d.]+\)", table[: table.index("\n\n")])
    assert found == [format_share(row["stopped"] / measured["samples"], measured["samples"]) for row in measured["rows"]]
    assert [row["qk_norm"] for row in measured["rows"]] == 4 * [False, True]
