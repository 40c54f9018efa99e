"""Texts and tables. Every name and text that a page shows goes through `to_html`."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any


def to_html(value: Any) -> str:
    """Any value as text, escaped."""
    return escape(show(value) if value is None or isinstance(value, float) else str(value))


def show(value: float | None) -> str:
    """Three digits. What JSON has no number for is "not finite"."""
    return "not finite" if value is None else f"{0.0 if abs(value) < 1e-15 else value:.3g}"


def render_table(label: str, columns: Iterable[str], rows: Iterable[Iterable[Any]], words: int = 1, tall: bool = False) -> str:
    """A table that scrolls by itself. The first `words` columns are text, the others numbers."""

    def mark(column: int) -> str:
        return "" if column < words else ' class="number"'

    head = "".join(f'<th scope="col"{mark(i)}>{to_html(name)}</th>' for i, name in enumerate(columns))
    body = "".join(f"<tr>{''.join(f'<td{mark(i)}>{to_html(cell)}</td>' for i, cell in enumerate(row))}</tr>\n" for row in rows)
    size = "wide tall" if tall else "wide"
    return (
        f'<div class="{size}" role="region" tabindex="0" aria-label="{to_html(label)}"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>\n"
    )
