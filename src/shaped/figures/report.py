"""report.html: all figures and claims in one file that needs nothing else."""

from __future__ import annotations

import base64
import json
from html import escape
from pathlib import Path
from typing import Any

from shaped.files import write_atomically

STYLE = """
body { font: 16px/1.45 Georgia, serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
h1, h2, nav { font-family: system-ui, sans-serif; line-height: 1.2 } h2 { margin-top: 3rem; border-top: 1px solid #ccc; padding-top: 1rem }
img { max-width: 100%; display: block; margin: 1rem auto }
table { border-collapse: collapse; font: 13px/1.35 system-ui, sans-serif; width: 100%; margin: 1rem 0 }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.holds { color: #00573d } .fails { color: #a33b00; font-weight: bold } .small { font: 13px/1.4 system-ui, sans-serif; color: #555 }
"""


def write_report(out: Path, ids: list[str]) -> Path:
    """Of all figures in the folder, whenever they were computed."""
    pages = [(id, json.loads((out / f"{id}.json").read_bytes())) for id in ids]
    path = out / "report.html"
    text = html(pages, {id: (out / f"{id}.png").read_bytes() for id in ids if (out / f"{id}.png").exists()})
    write_atomically(path, lambda file: file.write(text.encode()))
    return path


def html(pages: list[tuple[str, dict[str, Any]]], pictures: dict[str, bytes]) -> str:
    rows = [row for _, summary in pages for row in summary["claims"]]
    held = sum(row["holds"] for row in rows)
    overview = "".join(
        f'<tr><td><a href="#{id}">{escape(id)}</a></td><td>{escape(summary["title"])}</td>'
        f'<td class="number">{sum(row["holds"] for row in summary["claims"])} of {len(summary["claims"])}</td>'
        f'<td>{escape(summary["scale"])}</td><td class="number">{summary["seconds"]:.1f} s</td></tr>'
        for id, summary in pages
    )
    body = "".join(section(id, summary, pictures.get(id)) for id, summary in pages)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>The Shaped Transformer, reproduced</title><style>{STYLE}</style></head>'
        f"<body><h1>The Shaped Transformer, reproduced</h1><p>{held} of {len(rows)} claims hold. A claim holds if its whole 95 % interval lies on the right "
        "side of a threshold that was fixed before the run; where two laws are compared, if their distance is at most what samples of one law stay "
        "below (in all comparisons of 95 % of runs), plus 0.02. Each is checked for several numbers of tokens m, which the paper's captions do not give. "
        "Solid lines are networks, dashed lines the SDE.</p>"
        '<table><tr><th>figure</th><th></th><th class="number">claims that hold</th><th>scale</th><th class="number">computed in</th></tr>'
        f"{overview}</table>{body}</body></html>\n"
    )


def section(id: str, summary: dict[str, Any], picture: bytes | None) -> str:
    image = ""
    if picture is not None:
        data = base64.b64encode(picture).decode()
        image = f'<img alt="{escape(id + ": " + summary["title"])}" src="data:image/png;base64,{data}">'
    settings = ", ".join(f"{name} = {shown(value)}" for name, value in summary["settings"].items())
    smaller = "" if summary["scale"] == "paper" else " This is the quick scale: fewer samples than the paper's."
    return (
        f'<h2 id="{id}">{escape(id)}: {escape(summary["title"])}</h2><p>{escape(summary["shows"])}</p>{image}'
        f'<p class="small">Drawn for m = {summary["tokens"]} tokens. {escape(settings)}; seed {summary["seed"]}, {escape(summary["device"])}, shaped '
        f"{escape(summary['version'])}; {summary['seconds']:.1f} s.{smaller}</p>{extra(summary.get('table') or {})}{claims(summary['claims'])}"
    )


def claims(rows: list[dict[str, Any]]) -> str:
    head = '<tr><th>claim</th><th class="number">m</th><th class="number">measured</th><th class="number">95 % interval</th><th class="number">threshold</th><th></th></tr>'
    return f"<table>{head}{''.join(map(claim, rows))}</table>"


def claim(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    verdict = '<td class="holds">holds</td>' if row["holds"] else f'<td class="fails">fails: {escape(row["reason"])}</td>'
    return (
        f'<tr><td>{escape(row["claim"])}</td><td class="number">{row["tokens"]}</td><td class="number">{shown(row["value"])}</td>'
        f'<td class="number">{shown(low)} to {shown(high)}</td><td class="number">{row["relation"]} {shown(row["threshold"])}</td>{verdict}</tr>'
    )


def extra(table: dict[str, Any]) -> str:
    if not table:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in table["columns"])
    body = "".join(f"<tr>{''.join(f'<td>{escape(shown(cell))}</td>' for cell in cells)}</tr>" for cells in table["rows"])
    return f"<table><tr>{head}</tr>{body}</table>"


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(shown, value)) + ")"
    return str(value)
