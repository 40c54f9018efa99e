"""report.html: all figures and claims in one file that needs nothing else."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from shaped.figures.claims import TOLERANCE
from shaped.files import write_atomically

NEEDED = {"title", "shows", "scale", "tokens", "seed", "device", "version", "settings", "seconds", "claims"}
STYLE = """
body { font: 16px/1.45 Georgia, serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
h1, h2 { font-family: system-ui, sans-serif; line-height: 1.2 } h2 { margin-top: 3rem; border-top: 1px solid #ccc; padding-top: 1rem }
img { max-width: 100%; max-height: 28rem; display: block; margin: 1rem auto }
.wide { overflow-x: auto; margin: 1rem 0 } table { border-collapse: collapse; font: 13px/1.35 system-ui, sans-serif; width: 100% }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top; font-variant-numeric: tabular-nums }
.number { white-space: nowrap } .holds { color: #00573d } .fails { color: #a33b00; font-weight: bold } .why { color: #a33b00 }
.small { font: 13px/1.4 system-ui, sans-serif; color: #555 }
"""
HEAD = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>The Shaped Transformer, reproduced</title><style>{STYLE}</style></head><body>
<h1>The Shaped Transformer, reproduced</h1>
"""
RULES = f"""A claim holds if its whole 95 % interval lies on the right side of a threshold that was fixed before the run; where two laws are
compared, if their distance is at most what samples of one law stay below (in all comparisons of 95 % of runs), plus {TOLERANCE:g}. Each
is checked for several numbers of tokens m, which the paper's captions do not give. Solid lines are networks, dashed lines the SDE."""


def write_report(out: Path, ids: Iterable[str]) -> Path:
    """Of all these figures that are in the folder, whenever they were computed."""
    pages = {id: summary for id in ids if (summary := readable(out / f"{id}.json")) is not None and (out / f"{id}.png").exists()}
    text = html(pages, {id: (out / f"{id}.png").read_bytes() for id in pages})
    path = out / "report.html"
    write_atomically(path, lambda file: file.write(text.encode()))
    return path


def readable(path: Path) -> dict[str, Any] | None:
    """A figure's summary, or None if that is not what the file holds."""
    try:
        summary = json.loads(path.read_bytes())
        if not isinstance(summary, dict) or not summary.keys() >= NEEDED:
            return None
        html({"": summary}, {"": b""})  # whatever its entries are
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return summary


def html(pages: dict[str, dict[str, Any]], pictures: dict[str, bytes]) -> str:
    rows = [row for summary in pages.values() for row in summary["claims"]]
    overview = [
        [f'<a href="#{id}">{escape(id)}</a>', escape(summary["title"]), held(summary["claims"]), summary["scale"], seconds(summary)]
        for id, summary in pages.items()
    ]
    sections = "".join(section(id, summary, pictures[id]) for id, summary in pages.items())
    top = f"<p>{held(rows)} claims hold. {RULES}</p>{table(['figure', '', 'claims that hold', 'scale', 'computed in'], overview)}"
    return f"{HEAD}{top}{sections}</body></html>\n"


def section(id: str, summary: dict[str, Any], picture: bytes) -> str:
    data = base64.b64encode(picture).decode()
    settings = ", ".join(f"{name} = {shown(value)}" for name, value in summary["settings"].items())
    facts = [
        *([f"Drawn for m = {summary['tokens']} tokens"] if summary["tokens"] else []),
        escape(settings),
        f"seed {summary['seed']}, {escape(summary['device'])}, shaped {escape(summary['version'])}, {seconds(summary)}",
        {"paper": "paper scale", "quick": "quick scale: fewer samples than the paper's"}.get(summary["scale"], "as trained"),
    ]
    more = summary.get("table")
    found = table(["claim", "m", "measured", "95 % interval", "threshold", ""], map(claim, summary["claims"])) if summary["claims"] else ""
    extra = table(more["columns"], [[escape(shown(cell)) for cell in cells] for cells in more["rows"]]) if more else ""
    return (
        f'<h2 id="{id}">{escape(id)}: {escape(summary["title"])}</h2>\n<p>{escape(summary["shows"])}</p>\n'
        f'<img alt="{escape(summary["title"])}" src="data:image/png;base64,{data}">\n<p class="small">{"; ".join(facts)}.</p>\n'
        f"{extra}{found}"
    )


def claim(row: dict[str, Any]) -> list[str]:
    low, high = ("no end" if end is None else end for end in row["interval"])
    verdict = "holds" if row["holds"] else "fails"
    text = escape(row["claim"]) + ("" if row["holds"] else f'<br><span class="why">fails: {escape(row["reason"])}</span>')
    numbers = [shown(row["tokens"]), shown(row["value"]), f"{shown(low)} to {shown(high)}", f"{row['relation']} {shown(row['threshold'])}"]
    return [text, *(f'<span class="number">{number}</span>' for number in numbers), f'<span class="{verdict}">{verdict}</span>']


def table(columns: list[str], rows: Iterable[list[str]]) -> str:
    """Cells are HTML already."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    return (
        f'<div class="wide"><table><tr>{head}</tr>\n'
        + "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n" for cells in rows)
        + "</table></div>\n"
    )


def held(rows: list[dict[str, Any]]) -> str:
    return f"{sum(row['holds'] for row in rows)} of {len(rows)}" if rows else "–"


def seconds(summary: dict[str, Any]) -> str:
    return f"{summary['seconds']:.1f} s"


def shown(value: Any) -> str:
    if value is None or value != value:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(shown, value)) + ")"
    return str(value)
