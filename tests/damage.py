"""Random damages of folders, and what a command makes of them: the right answer, a word, or a refusal of one line.

    python tests/damage.py --count 1000 --seed 0

damages the folders of training: a finished and an unfinished run, prepared text, a file of collected runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Generator = np.random.Generator
LITERALS = ("NaN", "Infinity", "1e999", "1" + "0" * 400, "-1", str(2**62), "1e300", '"x"', "[]", "{}", "null", "true", "0.5")
"""In place of a value in JSON or TOML: of another type, too large for a float, for an array, or no JSON."""
WHOLES = (b"", b"[]", b"3", b"null", b'"x"', b"{}", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"\0" * 1000, b"NaN")
"""In place of a whole file."""


def damage(folder: Path, generator: Generator, leave: tuple[str, ...] = ()) -> str:
    """Damages one file under a folder, but none of these names, and says what was done to it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in leave)
    path = files[generator.integers(len(files))]
    kinds = [truncate, flip, scribble, delete, replace_whole, put_folder, put_loop, swap]
    if path.suffix in (".json", ".jsonl", ".toml"):
        kinds += [remove_entry, replace_value, replace_value, replace_value]
    done = kinds[generator.integers(len(kinds))](path, generator, files)
    return f"{path.relative_to(folder)}: {done}"


def truncate(path: Path, generator: Generator, files: list[Path]) -> str:
    size = int(generator.integers(max(1, path.stat().st_size)))
    os.truncate(path, size)
    return f"cut to {size} bytes"


def flip(path: Path, generator: Generator, files: list[Path]) -> str:
    content = bytearray(path.read_bytes())
    if not content:
        return "nothing to flip"
    place, bit = int(generator.integers(len(content))), int(generator.integers(8))
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {place} flipped"


def scribble(path: Path, generator: Generator, files: list[Path]) -> str:
    content = bytearray(path.read_bytes())
    place, count = int(generator.integers(len(content) + 1)), int(generator.integers(1, 33))
    content[place : place + count] = generator.bytes(count)
    path.write_bytes(content)
    return f"{count} random bytes at {place}"


def delete(path: Path, generator: Generator, files: list[Path]) -> str:
    path.unlink()
    return "deleted"


def replace_whole(path: Path, generator: Generator, files: list[Path]) -> str:
    content = WHOLES[generator.integers(len(WHOLES))]
    path.write_bytes(content)
    return f"replaced by {content[:8]!r}"


def put_folder(path: Path, generator: Generator, files: list[Path]) -> str:
    path.unlink()
    path.mkdir()
    return "replaced by a folder"


def put_loop(path: Path, generator: Generator, files: list[Path]) -> str:
    path.unlink()
    path.symlink_to(path.name)
    return "replaced by a link to itself"


def swap(path: Path, generator: Generator, files: list[Path]) -> str:
    other = files[generator.integers(len(files))]
    mine, its = path.read_bytes(), other.read_bytes()
    path.write_bytes(its)
    other.write_bytes(mine)
    return f"swapped with {other.parent.name}/{other.name}"


def remove_entry(path: Path, generator: Generator, files: list[Path]) -> str:
    def change(text: str) -> tuple[str, str]:
        if path.suffix == ".toml":
            return "", f"{text.split(' ')[0]} removed"
        value = json.loads(text)
        holders = [holder for holder in _holders(value) if isinstance(holder, dict) and holder]
        if not holders:
            return text, "nothing to remove"
        holder = holders[generator.integers(len(holders))]
        name = list(holder)[generator.integers(len(holder))]
        del holder[name]
        return json.dumps(value), f"{name} removed"

    return _change_line(path, generator, change)


def replace_value(path: Path, generator: Generator, files: list[Path]) -> str:
    literal = LITERALS[generator.integers(len(LITERALS))]

    def change(text: str) -> tuple[str, str]:
        if path.suffix == ".toml":
            name = text.split(" ")[0]
            return f"{name} = {literal}", f"{name} = {literal[:20]}"
        value = json.loads(text)
        places = [(holder, key) for holder in _holders(value) for key in (holder if isinstance(holder, dict) else range(len(holder)))]
        if not places:
            return literal, f"replaced by {literal[:20]}"
        holder, key = places[generator.integers(len(places))]
        holder[key] = "@@"
        return json.dumps(value).replace('"@@"', literal), f"{key} = {literal[:20]}"

    return _change_line(path, generator, change)


def _change_line(path: Path, generator: Generator, change: Callable[[str], tuple[str, str]]) -> str:
    """Of a file of lines one of them, of another all of it."""
    text = path.read_text()
    if path.suffix == ".json":
        made, done = change(text)
        path.write_text(made)
        return done
    lines = text.splitlines()
    if not lines:
        return "nothing to change"
    number = int(generator.integers(len(lines)))
    lines[number], done = change(lines[number])
    path.write_text("".join(line + "\n" for line in lines))
    return f"line {number + 1}, {done}"


def _holders(value: Any) -> Iterator[Any]:
    """All objects and lists in a JSON value."""
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _holders(inner)


@dataclass(frozen=True)
class Outcome:
    """What a command did: its status, its lines, what it answered, and the error that it should not have let through."""

    status: int
    errors: tuple[str, ...]
    answer: Any = None
    escaped: str = ""


class Hung(BaseException):
    """Not an Exception: nobody may take it for an error of a run."""


def command(arguments: list[str], patience: float = 60.0) -> Outcome:
    """Runs `shaped` in this process."""
    from shaped.commands import app as cli

    def late(number: int, frame: Any) -> None:
        raise Hung(f"no end after {patience:g} s")

    out, errors, before = io.StringIO(), io.StringIO(), sys.argv
    handler = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, patience)
    sys.argv = ["shaped", *arguments]
    status, escaped = 0, ""
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            cli.main()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 0
    except BaseException:
        escaped = traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        sys.argv = before
    lines = tuple(line for line in errors.getvalue().splitlines() if line.strip())
    return Outcome(status, lines, out.getvalue(), escaped)


def judge(found: Outcome, right: Outcome) -> str:
    """What became of a damage; a text that begins with "WRONG" if it may not."""
    refusals, words = [line for line in found.errors if line.startswith("shaped: ")], set(found.errors) - set(right.errors)
    if found.escaped:
        return f"WRONG: an error escaped: {found.escaped}"
    if found.status == 2:
        return "refused" if len(refusals) == 1 else f"WRONG: refused in other than one line: {found.errors}"
    if (found.status, found.answer) == (right.status, right.answer):
        return "right answer, and a word" if words else "right answer"
    if words:
        return "refused" if found.status == 1 else "another answer, and a word"
    return f"WRONG: another answer without a word: {found.answer!r:.2000} in place of {right.answer!r:.2000}"


def main() -> None:
    from train.run.damaged_runs import Place

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first damage: each is drawn from (seed, number)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="damage-"))
    try:
        place = Place(folder)
        outcomes: Counter[str] = Counter()
        wrong = 0
        for number in range(options.first, options.first + options.count):
            what, outcome = place.try_damage(np.random.default_rng([options.seed, number]))
            outcomes[outcome.split(":")[0]] += 1
            if outcome.startswith("WRONG"):
                wrong += 1
                print(f"{number}: {what}: {outcome}", flush=True)
            elif outcome != "right answer":
                print(f"{number}: {what}: {outcome}", flush=True)
        print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
