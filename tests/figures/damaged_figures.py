"""Random damages of the folder that `shaped reproduce` writes, and what the next run makes of them.

    PYTHONPATH=tests python tests/figures/damaged_figures.py --count 1000 --seed 0

The folder has two figures; the next run asks for one of them, or for both. What was damaged must be computed or drawn anew, left out of the
report with a word, or refused in one line.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tiny import SETTINGS

from damage import Outcome, command, damage
from shaped.figures.harness import reproduce, simulator

IDS = ("fig7", "fig8")


class Place:
    """A folder with two figures, tiny and of one number of tokens, and what it looked like when it was whole."""

    def __init__(self, folder: Path, patch: Callable[[Any, str, Any], None] = setattr):
        patch(simulator, "CLAIMED_TOKENS", ())
        for id in IDS:
            page = reproduce.load_page(id)
            patch(page, "settings", lambda scale, id=id: SETTINGS[id])
            once = page.compute(SETTINGS[id], simulator.Simulator())  # the same numbers would come again
            patch(page, "compute", lambda *_, once=once: once)
        self.whole, self.out = folder / "whole", folder / "out"
        found = command(["reproduce", *IDS, "--out", str(self.whole)])
        assert found.status == 0, found
        self.right = self.look(self.whole)

    def look(self, out: Path) -> dict[str, object]:
        """Everything that must be the same whenever it is made: all but the seconds it took."""
        numbers = {id: json.loads((out / f"{id}.json").read_bytes())["claims"] for id in IDS}
        files = {path.name: path.read_bytes() for path in out.iterdir() if path.suffix in (".npz", ".png", ".pdf")}
        return numbers | files | self.sections(out)

    def sections(self, out: Path) -> dict[str, object]:
        """The report's, by their figures."""
        text = re.sub(r"\d+\.\d s\b", "", (out / "report.html").read_text())
        return {f"section fig{part.split(chr(34))[0]}": part.partition("</section>")[0] for part in text.split('<section id="fig')[1:]}

    def try_damage(self, generator: np.random.Generator) -> tuple[str, str]:
        """What was damaged, and what became of it; a text that begins with "WRONG" if it may not."""
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.copytree(self.whole, self.out)
        what = damage(self.out, generator)
        asked = IDS[: generator.integers(1, len(IDS) + 1)]
        found = command(["reproduce", *asked, "--out", str(self.out)])
        return f"{what}, then {' '.join(asked)}", self.judge(asked, found)

    def judge(self, asked: tuple[str, ...], found: Outcome) -> str:
        if found.escaped:
            return f"WRONG: an error escaped: {found.escaped}"
        if found.status == 2:
            one = len(found.errors) == 1 and found.errors[0].startswith("shaped: ")
            return "refused" if one else f"WRONG: refused in other than one line: {found.errors}"
        if found.status != 0:
            return f"WRONG: status {found.status}"
        assert isinstance(found.answer, str)
        said = [line for line in found.answer.splitlines() if "is computed anew: " in line or "is not in the report: " in line]
        sections = self.sections(self.out)
        for id in IDS:
            section = f"section {id}"
            if section not in sections and not any(line.startswith(f"{id} ") for line in said):
                return f"WRONG: {id} is not in the report, without a word"
            if section in sections and sections[section] != self.right[section]:
                return f"WRONG: the report shows another {id}"
        for name, content in self.right.items():
            path = self.out / name
            if name.startswith(asked) and path.suffix and path.read_bytes() != content:
                return f"WRONG: {name} is another"
        claims = {id: json.loads((self.out / f"{id}.json").read_bytes())["claims"] for id in asked}
        if claims != {id: self.right[id] for id in asked}:
            return "WRONG: other claims"
        return "right, and a word" if said else "right"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        for number in range(options.count):
            what, outcome = place.try_damage(np.random.default_rng([options.seed, number]))
            outcomes[outcome.split(":")[0]] += 1
            print(f"{number}: {what}: {outcome}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    sys.exit(outcomes["WRONG"] > 0)


if __name__ == "__main__":
    main()
