"""Tables of claims: a row for each claim, a column for each number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shaped.figures.harness.claims import FAILS, HOLDS, NOT_PROVED, Row, count, group_claims, known_reason, list_tokens
from shaped.html.text import to_html

MARKS = {HOLDS: "✓", NOT_PROVED: "?", FAILS: "✗"}
PLURALS = {HOLDS: "hold", FAILS: "fail"}
Group = dict[int | None, Row]


def render_claims(label: str, rows: Sequence[Row]) -> str:
    """All claims of one page."""
    return render_groups(label, [("", group) for group in group_claims(rows)], list_tokens(rows))


def render_open_claims(label: str, pages: dict[str, list[Row]], verdict: str) -> str:
    """The claims of all pages of which this verdict is the worst, with links to their pages; empty if there are none.

    Those about training runs have a table of their own.
    """
    groups = [(id, group) for id, rows in pages.items() for group in group_claims(rows) if find_worst(group.values()) == verdict]
    tables = ""
    for about, here in (
        ("", [one for one in groups if None not in one[1]]),
        (" in training", [one for one in groups if None in one[1]]),
    ):
        if here:
            tables += render_groups(f"{label}{about}", here, list_tokens(row for _, group in here for row in group.values()))
    return tables


def render_groups(label: str, groups: Sequence[tuple[str, Group]], tokens: Sequence[int]) -> str:
    """`groups` are claims with the page to link to, or with none. Claims about training have no number of tokens, but a column."""
    trained = any(None in group for _, group in groups)
    columns: list[tuple[int | None, str]] = [*((m, f"m = {m}") for m in tokens), *([(None, "measured")] if trained else [])]
    linked = any(id for id, _ in groups)
    heads = [*(["figure"] if linked else []), "claim", *(name for _, name in columns), "must be"]
    head = "".join(f'<th scope="col" role="columnheader">{to_html(name)}</th>' for name in heads)
    body = "".join(render_group(id, group, columns, linked) for id, group in groups)
    return (
        f'<div class="wide claims" role="region" tabindex="0" aria-label="{to_html(label)}">'
        f'<table role="table"><thead role="rowgroup"><tr role="row">{head}</tr></thead>\n'
        f'<tbody role="rowgroup">{body}</tbody></table></div>\n'
    )


def render_group(id: str, group: Group, columns: Sequence[tuple[int | None, str]], linked: bool) -> str:
    first, worst = next(iter(group.values())), find_worst(group.values())
    link = f'<td role="cell" class="name"><a href="#{to_html(id)}">{to_html(id)}</a></td>' if linked else ""
    why = "".join(f'<span class="why">{to_html(reason)}.</span>' for reason in list_reasons(group.values()))
    cells = "".join(render_cell(group.get(m), name) for m, name in columns)
    threshold = f"{to_html(first['relation'])} {to_html(format_value(first['threshold']))}"
    return (
        f'<tr role="row">{link}<td role="cell" class="words">{render_verdict(worst)} {to_html(first["claim"])}{why}</td>'
        f'{cells}<td role="cell" class="threshold" data-label="must be">{threshold}</td></tr>\n'
    )


def render_cell(row: Row | None, name: str) -> str:
    if row is None:
        return '<td role="cell" class="measured empty">–</td>'
    low, high = ("no end" if end is None else format_value(end) for end in row["interval"])
    return (
        f'<td role="cell" class="measured" data-label="{to_html(name)}:"><b>{to_html(format_value(row["value"]))}</b> '
        f'<span class="interval">[{to_html(low)}, {to_html(high)}]</span> {render_verdict(row["verdict"])}</td>'
    )


def render_verdict(verdict: str, number: int | None = None) -> str:
    """A mark and the word: not told by colour alone."""
    words = verdict if number is None else f"{number} {verdict if number == 1 else PLURALS.get(verdict, verdict)}"
    mark = f'<span aria-hidden="true">{MARKS.get(verdict, "")}</span> ' if verdict in MARKS else ""
    return f'<span class="verdict {to_html(verdict.replace(" ", "-"))}">{mark}{to_html(words)}</span>'


def render_counts(rows: Sequence[Row]) -> str:
    """How many claims fail and are not proved, or that all hold."""
    counted = count(rows)
    wrong = [render_verdict(verdict, counted[verdict]) for verdict in (FAILS, NOT_PROVED) if counted[verdict]]
    return ", ".join(wrong or [render_verdict(HOLDS, len(rows)) if rows else "no claims"])


def find_worst(rows: Iterable[Row]) -> str:
    """The verdict of a claim over all numbers of tokens."""
    found = {row["verdict"] for row in rows}
    return next((verdict for verdict in (FAILS, NOT_PROVED, HOLDS) if verdict in found), next(iter(found)))


def list_reasons(rows: Iterable[Row]) -> list[str]:
    """What is known of those that do not hold, each text once, with the numbers of tokens that it is about."""
    known: dict[str, list[str]] = {}
    rows = list(rows)
    for row in rows:
        if why := known_reason(row):
            known.setdefault(why, []).append(f"m = {row['tokens']}")
    return [why if len(which) == len(rows) else f"{', '.join(which)}: {why}" for why, which in known.items()]


def format_value(value: Any) -> str:
    """Three digits for numbers, – for what is missing."""
    if value is None or value != value:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(format_value, value)) + ")"
    return str(value)
