"""What is new in a report: its figures held against those of the report that was in the folder before."""

from __future__ import annotations

import hashlib
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

from shaped.files import open_regular
from shaped.html.text import to_html

NAME = "shaped-figures"
State = dict[str, dict[str, str]]
"""Of each figure its scale and a hash of all its numbers, as `ABOUT`, and the verdicts of its claims by their ids."""
ABOUT = SCALE, NUMBERS = "scale", "numbers"


def take_state(pages: dict[str, dict[str, Any]]) -> State:
    return {
        id: {SCALE: str(about["scale"]), NUMBERS: hash_numbers(about)} | {str(row["id"]): str(row["verdict"]) for row in about["claims"]}
        for id, about in pages.items()
    }


def hash_numbers(about: dict[str, Any]) -> str:
    """The arrays are only of the number of tokens that is drawn: the claims count too, and the table."""
    numbers = json.dumps([about["arrays_sha256"], about["claims"], about["table"]], sort_keys=True)
    return hashlib.sha256(numbers.encode()).hexdigest()[:16]


def render_state(state: State) -> str:
    """For the head of the report, where `read_state` finds it."""
    return f'<meta name="{NAME}" content="{to_html(json.dumps(state, separators=(",", ":")))}">'


def read_state(path: Path) -> State | None:
    """The state in a report; empty if there is no file, None if the file, whatever it is, has none."""
    try:
        with open_regular(path) as file:
            found = re.search(rf'<meta name="{NAME}" content="([^"]*)">', file.read().decode())
        state = json.loads(unescape(found[1])) if found else None
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        return None
    sound = isinstance(state, dict) and all(
        re.fullmatch(r"\w+", id) and isinstance(figure, dict) and figure.keys() >= set(ABOUT) for id, figure in state.items()
    )
    return state if sound else None


def describe_news(before: State | None, now: State) -> str:
    """One line: the figures that were not in the last report, have other verdicts or other numbers, or are gone."""
    if before is None:
        return "the last report cannot be read, so it is not known what is new"
    if not before:
        return "all figures are new" if now else "there are no figures"
    changes = {id: describe_change(before.get(id), figure) for id, figure in now.items()}
    changes |= {id: "no longer in it" for id in before if id not in now}
    news = [f"{id} ({change})" for id, change in changes.items() if change]
    return f"new since the last report: {', '.join(news)}" if news else "nothing new since the last report"


def describe_change(old: dict[str, str] | None, new: dict[str, str]) -> str:
    """Of one figure; empty if it is as it was."""
    if old is None:
        return "not in the last one"
    claims, claims_before = new.keys() - ABOUT, old.keys() - ABOUT
    counted = {
        "verdict{} changed": sum(old[name] != new[name] for name in claims & claims_before),
        "claim{} more": len(claims - claims_before),
        "claim{} gone": len(claims_before - claims),
    }
    parts = [f"{number} {words.format('s' if number > 1 else '')}" for words, number in counted.items() if number]
    if not parts and old[NUMBERS] != new[NUMBERS]:
        parts = ["other numbers, same verdicts"]
    scale = [f"scale {new[SCALE]}, before {old[SCALE]}"] if old[SCALE] != new[SCALE] else []
    return ", ".join([*scale, *parts])
