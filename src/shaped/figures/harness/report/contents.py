"""The contents: a column beside the page on a desktop, a bar that unfolds on a phone."""

from __future__ import annotations

from typing import Any

from shaped.figures.harness.report.claim_tables import render_counts
from shaped.html.text import to_html

OPEN = "open"
"""Id of the list of claims that fail or are not proved."""


def render_contents(pages: dict[str, dict[str, Any]]) -> str:
    """Twice: the style shows one of them."""
    rows = [row for about in pages.values() for row in about["claims"]]
    links = [f'<a href="#{OPEN}"><b>What fails, and what is open</b><small>{render_counts(rows)}</small></a>']
    for id, about in pages.items():
        counts = render_counts(about["claims"])
        links.append(f'<a href="#{to_html(id)}"><b>{to_html(id)}</b> {to_html(about["title"])}<small>{counts}</small></a>')
    items = "".join(f"<li>{link}</li>" for link in links)
    listed = f'<ul class="contents">{items}</ul>'
    return (
        f'<nav class="side" aria-label="Contents">{listed}</nav>\n'
        f'<nav class="bar" aria-label="Contents"><details><summary>Contents</summary>{listed}</details></nav>\n'
    )
