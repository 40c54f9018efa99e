"""Training runs, from their folders or from a file that was made of them, such as those in docs/results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shaped.files import read_json, write_atomically, write_json
from shaped.train.metrics import read
from shaped.train.results import Result, kind_of
from shaped.train.settings import Settings

PLACES = ("data", "out", "minutes")  # settings that say nothing of the run


@dataclass(frozen=True)
class Trained:
    """What is left of a run: its settings, its metrics and, if it has been finished, its result and its GLUE scores by task."""

    name: str
    settings: dict[str, Any]
    metrics: list[dict[str, Any]] = field(default_factory=list)
    result: Result | None = None
    glue: dict[str, dict[str, Any]] = field(default_factory=dict)
    why: str = ""
    """Why it diverged, if it did."""

    @property
    def kind(self) -> str:
        return kind_of(self.settings["model"], self.settings["schedule"])


def trained(places: Iterable[Path]) -> list[Trained]:
    """The runs in these folders, however deep, and in these files. Where names are not enough to tell them apart, with their place's."""
    found: list[tuple[str, Trained]] = []
    for place in places:
        if not place.exists():
            raise ValueError(f"runs must be folders of runs or files that `shaped collect` made, got {place}, which is neither")
        if place.is_file():
            found += [(place.stem, run) for run in from_file(place)]
        else:
            folders = {path.parent for name in ("result.json", "settings.toml") for path in place.rglob(name)}
            for folder in sorted(folders):
                inside = folder.resolve() if folder == place else folder.relative_to(place)
                run = from_folder(folder)
                found.append((place.resolve().name, replace(run, name=inside.name if folder == place else inside.as_posix())))
    counts = Counter(run.name for _, run in found)
    named = [replace(run, name=f"{place}/{run.name}") if counts[run.name] > 1 else run for place, run in found]
    for name, count in Counter(run.name for run in named).items():
        if count > 1:
            raise ValueError(f"runs must be told apart by their names, got {name} {count} times")
    return named


def from_folder(folder: Path, planned: Settings | None = None) -> Trained:
    """`planned` are the settings of a run that may not have been begun."""
    result = Result.read(folder / "result.json") if (folder / "result.json").exists() else None
    settings = {} if planned is None else asdict(planned)
    if (folder / "settings.toml").exists():
        settings = asdict(Settings.from_toml(folder / "settings.toml"))
    elif result is not None:
        settings = result.settings | _main(result.to_dict())
    glue = {path: read_json(path, task=str, score=str, seeds=list) for path in sorted(folder.glob("glue-*.json"))}
    diverged = folder / "diverged.json"
    why = read_json(diverged, why=str)["why"] if result is None and diverged.exists() else ""
    kept = {name: value for name, value in settings.items() if name not in PLACES}
    scores = {about["task"]: about for about in glue.values()}
    return Trained(folder.name, kept, read(folder / "metrics.jsonl"), result, scores, why)


def from_file(path: Path) -> list[Trained]:
    """From what `collect` wrote."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        log = path.parent / about["log"]
        if not log.exists():
            raise ValueError(f"its metrics, {log}, are not there")
        lines: dict[str, list[dict[str, Any]]] = {}
        for line in read(log):
            lines.setdefault(line["run"], []).append(line)
        found = []
        for row in about["runs"]:
            name, glue = row["name"], row.get("glue", {})
            result = Result.of({key: value for key, value in row.items() if key not in ("name", "glue")})
            found.append(Trained(name, result.settings | _main(row), lines.get(name, []), result, glue))
        for row in about.get("unfinished", []):
            found.append(Trained(row["name"], row["settings"] | _main(row["settings"]), lines.get(row["name"], []), why=row["why"]))
        if len({run.name for run in found}) < len(found):
            raise ValueError("a name is there twice")
    except (KeyError, TypeError, ValueError) as error:
        words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}, {error}"
        raise ValueError(f"runs must be folders, or files that `shaped collect` made, got {path}: {words}") from None
    return found


def collect(runs: Sequence[Trained], out: Path, **about: Any) -> dict[str, Any]:
    """One file with all runs, and one of the same name, ending in .jsonl, with all their metrics; as docs/results keeps them."""
    if out.suffix != ".json":
        raise ValueError(f"out must end in .json, since the metrics go to a file that ends in .jsonl, got {out}")
    log = out.with_suffix(".jsonl")
    finished = [run for run in runs if run.result is not None]
    summary = about | {
        "log": log.name,
        "runs": [{"name": run.name} | run.result.to_dict() | ({"glue": run.glue} if run.glue else {}) for run in finished if run.result],
        "unfinished": [{"name": run.name, "why": run.why, "settings": run.settings} for run in runs if run.result is None],
    }
    lines = "".join(json.dumps({"run": run.name} | _short(line)) + "\n" for run in runs for line in run.metrics)
    write_atomically(log, lambda file: file.write(lines.encode()))
    write_json(out, summary)
    return summary


def _main(row: dict[str, Any]) -> dict[str, Any]:
    """What a result says of its settings beside them."""
    return {name: row[name] for name in ("model", "schedule", "depth", "width", "steps", "lr", "gamma", "seed")}


def _short(value: Any) -> Any:
    """Numbers with six digits: enough to draw and to compare, and half the file."""
    if isinstance(value, dict):
        return {name: _short(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_short(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
