"""report.html: all pages and claims in one self-contained file."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from shaped.figures.harness.cache import read_picture, read_summary
from shaped.figures.harness.claims import HOLDS, TOLERANCE, describe_verdicts
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
    """Reports the pages with these ids that are in the folder, also those of earlier runs. Says which are damaged, and leaves them out."""
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
    write_atomically(path, lambda file: file.write(render(pages, pictures).encode()))
    return path


def render(pages: dict[str, dict[str, Any]], pictures: dict[str, bytes]) -> str:
    """The whole report as HTML, from the summaries and PNGs of the pages by id."""
    overview = []
    for id, about in pages.items():
        cells = (about["title"], describe_verdicts(about["claims"]), about["scale"], format_seconds(about))
        overview.append([f'<a href="#{to_html(id)}">{to_html(id)}</a>', *map(to_html, cells)])
    counts = describe_verdicts([row for summary in pages.values() for row in summary["claims"]])
    table = render_table(["figure", "", "verdicts", "scale", "computed in"], overview)
    sections = "".join(render_section(id, summary, pictures[id]) for id, summary in pages.items())
    return f"{HEAD}<p>{to_html(counts)}. {to_html(RULES)}</p>{table}{sections}</body></html>\n"


def render_section(id: str, summary: dict[str, Any], picture: bytes) -> str:
    data = base64.b64encode(picture).decode()
    facts = [
        *([f"Drawn for m = {summary['tokens']} tokens"] if summary["tokens"] else []),
        ", ".join(f"{name} = {format_value(value)}" for name, value in summary["settings"].items()),
        f"seed {summary['seed']}, {summary['device']}, shaped {summary['version']}, {format_seconds(summary)}",
        {"paper": "paper scale", "quick": "quick scale: fewer samples than the paper's"}.get(summary["scale"], "as trained"),
    ]
    more = summary["table"]
    found = render_table(["claim", "m", "measured", "95 % interval", "threshold", "verdict"], map(render_claim, summary["claims"]))
    extra = render_table(more["columns"], [[to_html(cell) for cell in cells] for cells in more["rows"]]) if more else ""
    return (
        f'<h2 id="{to_html(id)}">{to_html(id)}: {to_html(summary["title"])}</h2>\n<p>{to_html(summary["shows"])}</p>\n'
        f'<img alt="{to_html(summary["title"])}" src="data:image/png;base64,{data}">\n<p class="small">{to_html("; ".join(facts))}.</p>\n'
        f"{extra}{found if summary['claims'] else ''}"
    )


def render_claim(row: dict[str, Any]) -> list[str]:
    low, high = ("no end" if end is None else format_value(end) for end in row["interval"])
    kind = row["verdict"].replace(" ", "-")
    reason = (
        "" if row["verdict"] == HOLDS else f'<br><span class="{to_html(kind)}">{to_html(row["verdict"])}: {to_html(row["reason"])}</span>'
    )
    numbers = [row["tokens"], row["value"], f"{low} to {high}", f"{row['relation']} {format_value(row['threshold'])}"]
    cells = (f'<span class="number">{to_html(number)}</span>' for number in numbers)
    return [to_html(row["claim"]) + reason, *cells, f'<span class="number {to_html(kind)}">{to_html(row["verdict"])}</span>']


def render_table(columns: list[str], rows: Iterable[list[str]]) -> str:
    """Column names are escaped here; cells are HTML already."""
    head = "".join(f"<th>{to_html(name)}</th>" for name in columns)
    return (
        f'<div class="wide"><table><tr>{head}</tr>\n'
        + "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n" for cells in rows)
        + "</table></div>\n"
    )


def format_seconds(summary: dict[str, Any]) -> str:
    return f"{summary['seconds']:.1f} s"


def to_html(value: Any) -> str:
    """Any value as text, escaped. Every field of a summary goes through here."""
    return escape(format_value(value))


def format_value(value: Any) -> str:
    if value is None or value != value:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(format_value, value)) + ")"
    return str(value)
