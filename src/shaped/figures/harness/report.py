"""report.html: all figures and claims in one file that needs nothing else."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from shaped.figures.harness.cache import read_picture, read_summary
from shaped.figures.harness.claims import HOLDS, TOLERANCE, counted
from shaped.files import write_atomically

STYLE = """
body { font: 16px/1.45 Georgia, serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
h1, h2 { font-family: system-ui, sans-serif; line-height: 1.2 } h2 { margin-top: 3rem; border-top: 1px solid #ccc; padding-top: 1rem }
img { max-width: 100%; max-height: 28rem; display: block; margin: 1rem auto }
.wide { overflow-x: auto; margin: 1rem 0 } table { border-collapse: collapse; font: 13px/1.35 system-ui, sans-serif; width: 100% }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top; font-variant-numeric: tabular-nums }
.number { white-space: nowrap } .holds { color: #00573d } .fails { color: #a33b00; font-weight: bold } .not-proved { color: #6b5200 }
.small { font: 13px/1.4 system-ui, sans-serif; color: #555 }
"""
HEAD = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>The Shaped Transformer, reproduced</title><style>{STYLE}</style></head><body>
<h1>The Shaped Transformer, reproduced</h1>
"""
RULES = f"""A claim holds if its whole 95 % interval lies on the right side of a threshold that was fixed before the run, and fails if the
whole interval lies on the wrong side; with the threshold inside the interval it is not proved. Two laws agree within {TOLERANCE:g}; the
interval of their distance is what was measured ± the band of one law. Each claim is checked for several numbers of tokens m, which the
paper's captions do not give. Solid lines are networks, dashed lines the SDE."""


def write_report(out: Path, ids: Iterable[str], say: Callable[[str], None] = print) -> Path:
    """Of all these figures that are in the folder, whenever they were computed. What is damaged is said, and left out."""
    pages, pictures = {}, {}
    for id in ids:
        if any(os.path.lexists(out / f"{id}.{kind}") for kind in ("json", "npz", "png")):
            try:
                summary = read_summary(out / f"{id}.json")
                pictures[id] = read_picture(out / f"{id}.png", summary)
                pages[id] = summary
            except ValueError as error:
                say(f"{id:<7} is not in the report: {error}")
    path = out / "report.html"
    write_atomically(path, lambda file: file.write(html(pages, pictures).encode()))
    return path


def html(pages: dict[str, dict[str, Any]], pictures: dict[str, bytes]) -> str:
    rows = [row for summary in pages.values() for row in summary["claims"]]
    overview = [
        [f'<a href="#{text(id)}">{text(id)}</a>', *map(text, (about["title"], counted(about["claims"]), about["scale"], seconds(about)))]
        for id, about in pages.items()
    ]
    sections = "".join(section(id, summary, pictures[id]) for id, summary in pages.items())
    top = f"<p>{text(counted(rows))}. {text(RULES)}</p>{table(['figure', '', 'verdicts', 'scale', 'computed in'], overview)}"
    return f"{HEAD}{top}{sections}</body></html>\n"


def section(id: str, summary: dict[str, Any], picture: bytes) -> str:
    data = base64.b64encode(picture).decode()
    facts = [
        *([f"Drawn for m = {summary['tokens']} tokens"] if summary["tokens"] else []),
        ", ".join(f"{name} = {shown(value)}" for name, value in summary["settings"].items()),
        f"seed {summary['seed']}, {summary['device']}, shaped {summary['version']}, {seconds(summary)}",
        {"paper": "paper scale", "quick": "quick scale: fewer samples than the paper's"}.get(summary["scale"], "as trained"),
    ]
    more = summary["table"]
    found = table(["claim", "m", "measured", "95 % interval", "threshold", "verdict"], map(claim, summary["claims"]))
    extra = table(more["columns"], [[text(cell) for cell in cells] for cells in more["rows"]]) if more else ""
    return (
        f'<h2 id="{text(id)}">{text(id)}: {text(summary["title"])}</h2>\n<p>{text(summary["shows"])}</p>\n'
        f'<img alt="{text(summary["title"])}" src="data:image/png;base64,{data}">\n<p class="small">{text("; ".join(facts))}.</p>\n'
        f"{extra}{found if summary['claims'] else ''}"
    )


def claim(row: dict[str, Any]) -> list[str]:
    low, high = ("no end" if end is None else shown(end) for end in row["interval"])
    kind = row["verdict"].replace(" ", "-")
    reason = "" if row["verdict"] == HOLDS else f'<br><span class="{text(kind)}">{text(row["verdict"])}: {text(row["reason"])}</span>'
    numbers = [row["tokens"], row["value"], f"{low} to {high}", f"{row['relation']} {shown(row['threshold'])}"]
    cells = (f'<span class="number">{text(number)}</span>' for number in numbers)
    return [text(row["claim"]) + reason, *cells, f'<span class="number {text(kind)}">{text(row["verdict"])}</span>']


def table(columns: list[str], rows: Iterable[list[str]]) -> str:
    """Cells are HTML already."""
    head = "".join(f"<th>{text(name)}</th>" for name in columns)
    return (
        f'<div class="wide"><table><tr>{head}</tr>\n'
        + "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n" for cells in rows)
        + "</table></div>\n"
    )


def seconds(summary: dict[str, Any]) -> str:
    return f"{summary['seconds']:.1f} s"


def text(value: Any) -> str:
    """Any value as HTML: every field of a summary goes through here."""
    return escape(shown(value))


def shown(value: Any) -> str:
    if value is None or value != value:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(shown, value)) + ")"
    return str(value)
