"""What is new in a report: its figures held against those of the report that was in the folder before."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

from shaped.files import open_regular
from shaped.html.text import to_html

NAME = "shaped-figures"
State = dict[str, dict[str, str]]
"""Of each figure a hash of its arrays, as `ARRAYS`, and the verdicts of its claims by their ids."""
ARRAYS = "arrays"


def take_state(pages: dict[str, dict[str, Any]]) -> State:
    return {
        id: {ARRAYS: str(about["arrays_sha256"])[:16]} | {str(row["id"]): str(row["verdict"]) for row in about["claims"]}
        for id, about in pages.items()
    }


def render_state(state: State) -> str:
    """For the head of the report, where `read_state` finds it."""
    return f'<meta name="{NAME}" content="{to_html(json.dumps(state, separators=(",", ":")))}">'


def read_state(path: Path) -> State:
    """The state in a report; empty if there is none, whatever the file is."""
    try:
        with open_regular(path) as file:
            found = re.search(rf'<meta name="{NAME}" content="([^"]*)">', file.read().decode())
        state = json.loads(unescape(found[1])) if found else {}
    except (OSError, ValueError, RecursionError):
        return {}
    sound = isinstance(state, dict) and all(re.fullmatch(r"\w+", id) and isinstance(figure, dict) for id, figure in state.items())
    return state if sound else {}


def describe_news(before: State, now: State) -> str:
    """One line: the figures that are there for the first time, have other verdicts or other numbers, or are gone."""
    if not before:
        return "all figures are new"
    news = []
    for id, figure in now.items():
        old = before.get(id)
        changed = 0 if old is None else sum(old.get(name) != figure.get(name) for name in (old.keys() | figure.keys()) - {ARRAYS})
        if old is None:
            news.append(f"{id} (first time)")
        elif changed:
            news.append(f"{id} ({changed} verdict{'s' if changed > 1 else ''} changed)")
        elif old.get(ARRAYS) != figure[ARRAYS]:
            news.append(f"{id} (other numbers, same verdicts)")
    news += [f"{id} (no longer in it)" for id in before if id not in now]
    return f"new since the last report: {', '.join(news)}" if news else "nothing new since the last report"
