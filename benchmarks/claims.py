"""The claims in the documents, from finished folders of `shaped reproduce`.

    python benchmarks/claims.py out/paper out/quick

writes docs/results/reproduce-paper.json and reproduce-quick.json from the figures in these folders, and the pictures of the former; then it
rewrites what stands between `<!-- claims NAME -->` and `<!-- end -->` in README.md and docs/figures.md. Without folders it does only that.
A figure that is in no folder stays as it was. With --pictures only the pictures are drawn, for a change in how they are drawn.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

from shaped.figures.harness.cache import read_arrays, read_summary
from shaped.figures.harness.claims import HOLDS, Row, count, describe_verdicts, group_claims, known_reason, list_tokens
from shaped.figures.harness.reproduce import FIGURES, TRAINED, load_page
from shaped.figures.harness.style import apply_style
from shaped.files import write_atomically, write_json
from shaped.train.run.result import find_commit

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "figures.md")
LEFT_OUT = ("arrays_sha256", "code", "shows")  # of a summary: of no use without its folder, or in the code
MARKED = re.compile(r"(<!-- claims ([\w ]+) -->)(.*?)(<!-- end -->)", re.DOTALL)


def results(scale: str) -> Path:
    return ROOT / "docs" / "results" / f"reproduce-{scale}.json"


def read(scale: str) -> dict[str, dict[str, Any]]:
    """The figures in the results, by their ids."""
    return {about["figure"]: about for about in json.loads(results(scale).read_text())["figures"]}


def collect(folders: list[Path], only_pictures: bool = False) -> None:
    """Takes the figures of these folders into the results, beside what is there, and draws their pictures."""
    found: dict[str, dict[str, dict[str, Any]]] = {"paper": {}, "quick": {}}
    for folder in folders:
        if not any((folder / f"{id}.json").exists() for id in FIGURES + TRAINED):
            raise ValueError(f"folders must be of `shaped reproduce`, got {folder}, which has no figure")
        for id in FIGURES + TRAINED:
            if (folder / f"{id}.json").exists():
                summary = read_summary(folder / f"{id}.json")
                scale = "quick" if summary["scale"] == "quick" else "paper"
                found[scale][id] = {name: value for name, value in summary.items() if name not in LEFT_OUT} | {"commit": find_commit()}
                if scale == "paper":
                    draw(id, summary, read_arrays(folder / f"{id}.npz", summary))
    for scale, figures in found.items():
        if figures and not only_pictures:
            write_results(scale, (read(scale) if results(scale).exists() else {}) | figures)


def write_results(scale: str, figures: dict[str, dict[str, Any]]) -> None:
    ordered = [figures[id] for id in FIGURES + TRAINED if id in figures]
    rows = [row for about in ordered for row in about["claims"]]
    command = f"shaped reproduce all --scale {scale}"
    write_json(results(scale), {"command": command, "claims": len(rows), "verdicts": count(rows), "figures": ordered})
    print(f"written: {results(scale).relative_to(ROOT)}: {describe_verdicts(rows)}")


def draw(id: str, summary: dict[str, Any], arrays: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    with apply_style():
        load_page(id).draw(summary, arrays).savefig(buffer, format="png", dpi=220)
    write_atomically(ROOT / "docs" / "images" / f"{id}.png", lambda file: file.write(buffer.getvalue()))


def rewritten(text: str) -> str:
    """A page, with what stands between its marks as the results have it."""
    paper, quick = read("paper"), read("quick")

    def replaced(match: re.Match[str]) -> str:
        begin, name, _, end = match.groups()
        if name in paper:
            content = f"\n{table(paper[name]['claims'])}{reasons(paper[name]['claims'])}\n"
        elif name == "quick run":
            content = f"\n```\n{terminal(quick)}\n```\n"
        else:
            scale, _, which = name.partition(" ")
            figures = {"paper": paper, "quick": quick}[scale]
            ids = {"figures": FIGURES, "training": TRAINED}[which]
            content = describe_verdicts([row for id in ids if id in figures for row in figures[id]["claims"]])
        return f"{begin}{content}{end}"

    return MARKED.sub(replaced, text)


def table(rows: list[Row]) -> str:
    """A line for each claim, a column for each number of tokens."""
    tokens = list_tokens(rows)
    columns = [f"m = {m}" for m in tokens] or ["measured"]
    lines = [["claim", "threshold", *columns], ["---"] * (2 + len(columns))]
    for here in group_claims(rows):
        first = next(iter(here.values()))
        threshold = f"{first['relation']} {first['threshold']:.3g}"
        lines.append([first["claim"].replace("|", r"\|"), threshold, *(cell(here.get(m)) for m in tokens or [None])])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(row: Row | None) -> str:
    if row is None:
        return "–"
    low, high = ("no end" if end is None else f"{end:.3g}" for end in row["interval"])
    return f"{row['value']:.3g} [{low}, {high}]" + ("" if row["verdict"] == HOLDS else f" **{row['verdict']}**")


def reasons(rows: list[Row]) -> str:
    """What is known of claims that do not hold, beside their numbers."""
    known: dict[str, list[str]] = {}
    for row in rows:
        if why := known_reason(row):
            known.setdefault(why, []).append(f"`{row['id']}` ({row['verdict']})")
    return "".join(["\nWhat is known of them:\n\n" if known else "", *(f"- {', '.join(ids)}: {why}.\n" for why, ids in known.items())])


def terminal(figures: dict[str, dict[str, Any]]) -> str:
    """What `shaped reproduce` prints, without the lines about single claims."""
    lines = [f"{id:<7} {describe_verdicts(about['claims'])}; {about['seconds']:.1f} s" for id, about in figures.items()]
    return "\n".join([*lines, f"in all  {describe_verdicts([row for about in figures.values() for row in about['claims']])}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="folders of `shaped reproduce`")
    parser.add_argument("--pictures", action="store_true", help="draw the pictures, and leave the numbers")
    options = parser.parse_args()
    collect(options.folders, options.pictures)
    for path in PAGES:
        made = rewritten(path.read_text()).encode()
        write_atomically(path, lambda file, made=made: file.write(made))


if __name__ == "__main__":
    sys.exit(main())
