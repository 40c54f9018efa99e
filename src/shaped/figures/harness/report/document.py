"""The page: a summary, what fails or is open, then a section for each figure."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import shaped
from shaped.figures.harness.cache import Picture, read_picture, read_summary
from shaped.figures.harness.claims import FAILS, NOT_PROVED, TOLERANCE, VERDICTS, count, describe_verdicts
from shaped.figures.harness.report.claim_tables import format_value, render_claims, render_open_claims, render_verdict
from shaped.figures.harness.report.contents import OPEN, render_contents
from shaped.figures.harness.report.news import describe_news, read_state, render_state, take_state
from shaped.figures.harness.report.style import STYLE
from shaped.files import write_atomically
from shaped.html.document import render_document
from shaped.html.text import render_table, to_html

TITLE = "The Shaped Transformer, reproduced"
PAPER = "https://arxiv.org/abs/2306.17759"
DOCS = {"figures.md": "the figures and their claims at the paper's scale", "equations.md": "the equations and their tests"}
BROAD = 1200
"""Pixels of a picture from which on it has several panels, and is not squeezed into the width of a phone."""
RULES = f"""A claim holds if its whole 95 % interval lies on the right side of a threshold that was fixed before the run. It fails if the
whole interval lies on the wrong side. With the threshold inside the interval it is not proved: these samples do not decide. Two laws agree
within {TOLERANCE:g}; the interval of their distance is what was measured ± the band of one law. Most claims about simulations are checked
for several numbers of tokens m, which the paper's captions do not give. Solid lines are networks, dashed lines the SDE, unless a legend
says otherwise."""
SCALES = {
    "paper": "at the paper's scale",
    "quick": "at the quick scale (fewer samples than the paper's, which prove less)",
    "training": "from training runs",
}


@dataclass(frozen=True)
class Report:
    """Where the report is, and one line on what is in it and what is new."""

    path: Path
    line: str


def write_report(out: Path, ids: Iterable[str], say: Callable[[str], None] = print) -> Report:
    """Reports the pages with these ids that are in the folder, also those of earlier runs. Says which are damaged, and leaves them out."""
    pages, pictures, damaged = {}, {}, []
    for id in ids:
        if any(os.path.lexists(out / f"{id}.{kind}") for kind in ("json", "npz", "png")):
            try:
                summary = read_summary(out / f"{id}.json")
                pictures[id] = read_picture(out / f"{id}.png", summary)
                pages[id] = summary
            except ValueError as error:
                say(f"{id:<7} is not in the report: {error}")
                damaged.append(f"{id} ({error})")
    path = out / "report.html"
    news = describe_news(read_state(path), take_state(pages))
    text = render(pages, pictures, news, find_docs(out), damaged)
    write_atomically(path, lambda file: file.write(text.encode()))
    claims = describe_verdicts([row for summary in pages.values() for row in summary["claims"]])
    return Report(path, f"report: {path}: {claims}; {news}")


def find_docs(out: Path) -> str:
    """The address of the repository's documents from the folder; empty if the package was installed without them."""
    docs = Path(shaped.__file__).resolve().parents[2] / "docs"
    return quote(Path(os.path.relpath(docs, out.resolve())).as_posix()) if all((docs / name).is_file() for name in DOCS) else ""


def render(
    pages: dict[str, dict[str, Any]], pictures: dict[str, Picture], news: str = "", docs: str = "", damaged: Sequence[str] = ()
) -> str:
    """The whole report as HTML, from the summaries and pictures of the pages by id.

    `docs` is the address of the documents, if known; `damaged` are figures that are left out, each with the reason.
    """
    sections = "".join(render_section(id, summary, pictures[id]) for id, summary in pages.items())
    body = f"{render_contents(pages)}<main>\n{render_summary(pages, news, docs, damaged)}{render_open_list(pages)}{sections}</main>"
    return render_document(TITLE, STYLE, body, images=True, meta=render_state(take_state(pages)))


def render_summary(pages: dict[str, dict[str, Any]], news: str, docs: str, damaged: Sequence[str]) -> str:
    rows = [row for about in pages.values() for row in about["claims"]]
    counted = count(rows)
    cards = "".join(f"<li>{render_verdict(verdict, counted[verdict])}</li>" for verdict in VERDICTS)
    scales = {about["scale"]: sum(one["scale"] == about["scale"] for one in pages.values()) for about in pages.values()}
    made = ", ".join(f"{number} {describe_scale(scale)}" for scale, number in scales.items())
    missing = f'<p class="bad">Damaged, and not in this report: {to_html("; ".join(damaged))}.</p>\n' if damaged else ""
    places = " · ".join(
        f'<a href="{to_html(f"{docs}/{name}")}">{to_html(words)}</a>' if docs else f"{to_html(words)} (<code>docs/{name}</code>)"
        for name, words in DOCS.items()
    )
    said = f"{describe_verdicts(rows)}. {news and f'{news[0].upper()}{news[1:]}.'}"
    return (
        f"<h1>{to_html(TITLE)}</h1>\n<p>{to_html(said[0].upper() + said[1:])}</p>\n{missing}"
        f'<ul class="counts">{cards}</ul>\n<p class="soft">Figures: {to_html(made or "none")}. shaped {to_html(shaped.__version__)}.</p>\n'
        f'<p class="soft"><a href="{PAPER}" rel="noopener noreferrer">The paper (arXiv 2306.17759)</a> · {places}</p>\n'
        f"<details><summary>How a verdict is made</summary><p>{to_html(RULES)}</p></details>\n"
    )


def render_open_list(pages: dict[str, dict[str, Any]]) -> str:
    """What fails, then what is not proved, of all figures."""
    claims = {id: about["claims"] for id, about in pages.items()}
    parts = ""
    for verdict, title in ((FAILS, "Fails"), (NOT_PROVED, "Not proved")):
        if table := render_open_claims(f"Claims: {title.lower()}", claims, verdict):
            parts += f"<h3>{title}</h3>\n{table}"
    none = f"<p>{'Every claim holds' if any(claims.values()) else 'There are no claims'}.</p>\n"
    return f'<section id="{OPEN}"><h2>What fails, and what is open</h2>\n{parts or none}</section>\n'


def render_section(id: str, summary: dict[str, Any], picture: Picture) -> str:
    data, name, more = base64.b64encode(picture.png).decode(), to_html(id), summary["table"]
    size = f'width="{picture.width // 2}" height="{picture.height // 2}"'  # two pixels of the picture to one of the page
    kind = ' class="broad"' if picture.width >= BROAD else ""
    claims = render_claims(f"Claims of {id}", summary["claims"]) if summary["claims"] else ""
    table = ""
    if more:
        cells = [[format_value(cell) for cell in row] for row in more["rows"]]
        table = f"<h3>Numbers</h3>\n{render_table(f'Numbers of {id}', more['columns'], cells)}"
    return (
        f'<section id="{name}"><h2>{name}: {to_html(summary["title"])}</h2>\n<p>{to_html(summary["shows"])}</p>\n'
        f'<div class="picture" role="region" tabindex="0" aria-label="Picture of {name}">'
        f'<img{kind} {size} alt="{to_html(picture.seen or summary["shows"])}" src="data:image/png;base64,{data}"></div>\n'
        f"{claims}{table}{render_settings(id, summary)}</section>\n"
    )


def render_settings(id: str, summary: dict[str, Any]) -> str:
    drawn = [f"drawn for m = {format_value(summary['tokens'])} tokens"] if summary["tokens"] else []
    facts = [
        ", ".join([*drawn, describe_scale(summary["scale"])]),
        f"seed {format_value(summary['seed'])}, {summary['device']}, shaped {summary['version']}, computed in {summary['seconds']:.1f} s",
        *(f"{name} = {format_value(value)}" for name, value in summary["settings"].items()),
    ]
    items = "".join(f"<li>{to_html(fact)}</li>" for fact in facts)
    return f'<details><summary class="soft">Settings of {to_html(id)}</summary><ul class="soft">{items}</ul></details>\n'


def describe_scale(scale: str) -> str:
    return SCALES.get(scale, scale)
