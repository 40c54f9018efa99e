"""Records of training runs, read from their folders or from a file that `shaped collect` wrote, such as those in docs/results."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shaped.files import check_entries, check_writable, read_json, sha256, write_atomically, write_sealed
from shaped.train.run import checkpoint
from shaped.train.run.folder import HISTORY, check_files, read_settings
from shaped.train.run.metrics import read_metrics
from shaped.train.run.result import MAIN, Result, check_scores, check_settings, name_kind
from shaped.train.run.settings import PLACES, Settings


@dataclass(frozen=True)
class RunRecord:
    """What a run left: its settings, its metrics and, if it has been finished, its result and its GLUE scores by task."""

    name: str
    settings: dict[str, Any]
    metrics: list[dict[str, Any]] = field(default_factory=list)
    result: Result | None = None
    glue: dict[str, dict[str, Any]] = field(default_factory=dict)
    why: str = ""
    """Why it diverged, if it did."""

    def __post_init__(self) -> None:
        """Checks everything that tables and figures rely on, wherever it was read from."""
        check_settings(self.settings)
        for line in self.metrics:
            if line["kind"] == "layers" and len(line["entropy"]) < self.settings["depth"]:
                raise ValueError(f"metrics must have {self.settings['depth']} layers, got {len(line['entropy'])} at step {line['step']}")
        for task, scores in self.glue.items():
            if check_scores(f"the scores of {task}", scores)["task"] != task:
                raise ValueError(f"the scores of {task} must be of that task, got {scores['task']!r:.60}")

    @property
    def kind(self) -> str:
        return name_kind(self.settings)

    @property
    def objective(self) -> str:
        return self.settings.get("objective", "masked")  # the only one, when records did not say it


def read_runs(places: Iterable[Path]) -> list[RunRecord]:
    """The runs in these folders, at any depth, and in these files. Equal names get their place's name as a prefix.

    Of a run that has been finished in one of them, an unfinished record in another is left out.
    """
    found: list[tuple[str, RunRecord]] = []
    for place in places:
        if not place.exists():
            raise ValueError(f"runs must be folders of runs or files that `shaped collect` made, got {place}, which is neither")
        if place.is_file():
            found += [(place.stem, run) for run in read_file(place)]
        else:
            # Metrics alone are no run. They are listed so that a run that lost its settings is an error and not overlooked.
            folders = {path.parent for name in ("result.json", "settings.toml", "metrics.jsonl") for path in place.rglob(name)}
            for folder in sorted(folders):
                inside = folder.resolve() if folder == place else folder.relative_to(place)
                run = read_folder(folder)
                found.append((place.resolve().name, replace(run, name=inside.name if folder == place else inside.as_posix())))
    found = _leave_out_begun(found)
    counts = Counter(run.name for _, run in found)
    named = [replace(run, name=f"{place}/{run.name}") if counts[run.name] > 1 else run for place, run in found]
    for name, count in Counter(run.name for run in named).items():
        if count > 1:
            raise ValueError(f"runs must be told apart by their names, got {name} {count} times")
    return named


def _leave_out_begun(found: list[tuple[str, RunRecord]]) -> list[tuple[str, RunRecord]]:
    """Without the records of runs that were unfinished in one place and are finished in another, as when a study went on elsewhere."""
    finished = {run.name: run for _, run in found if run.result is not None}

    def is_begun(run: RunRecord) -> bool:
        other = finished.get(run.name) if run.result is None and not run.why else None
        # Older records lack settings that came later.
        return other is not None and all(run.settings[key] == other.settings[key] for key in run.settings.keys() & other.settings.keys())

    return [(place, run) for place, run in found if not is_begun(run)]


def read_folder(folder: Path, planned: Settings | None = None) -> RunRecord:
    """The record of the run in a folder. `planned` are its settings if it may not have begun."""
    try:
        return _read_folder(folder, planned)
    except OSError as error:
        raise ValueError(f"runs must be folders that can be read, got {folder}: {error}") from None
    except ValueError as error:
        if str(folder) in str(error):
            raise
        raise ValueError(f"{folder} must be the folder of a run, got something else: {error}") from None


def _read_folder(folder: Path, planned: Settings | None) -> RunRecord:
    result = None
    if exists(folder / "result.json"):
        result = Result.read(folder / "result.json")
        check_files(folder, HISTORY.__contains__)
    if exists(folder / "settings.toml"):
        settings = read_settings(folder).record()
    elif result is not None:
        settings = {name: value for name, value in result.settings.items() if name not in PLACES} | _select_main(result.to_dict())
    elif planned is not None:
        settings = planned.record()
    else:
        raise ValueError("it has metrics.jsonl, but neither settings.toml nor result.json")
    glue = {}
    for path in sorted(folder.glob("glue-*.json")):
        glue[path.stem.removeprefix("glue-")] = read_json(path)
    diverged = folder / "diverged.json"
    why = read_json(diverged, why=str)["why"] if result is None and exists(diverged) else ""
    # The checkpoint first: another process may write more lines, and then a checkpoint that counts them.
    step, written = checkpoint.count_metrics(folder / "checkpoints") if result is None else (0, 0)
    lines = read_metrics(folder / "metrics.jsonl")
    if (there := sum(line["step"] <= step for line in lines)) < written:
        raise ValueError(f"metrics.jsonl has {there} of the {written} lines up to step {step}; a run that goes on does without them")
    return RunRecord(folder.name, settings, lines, result, glue, why)


def exists(path: Path) -> bool:
    """True also for a dangling link: it is a damaged file, not a missing one."""
    return os.path.lexists(path)


def read_file(path: Path) -> list[RunRecord]:
    """The records in a file that `collect` wrote."""
    try:
        about = read_json(path, log=str, runs=list)
        name = about["log"]
        if Path(name).name != name:
            raise ValueError(f"its log must be a file beside it, got {name!r:.60}")
        log = path.parent / name
        if not log.exists():
            raise ValueError(f"its metrics, {log}, are not there")
        if about.get("log_sha256", sha256(log)) != sha256(log):  # older ones have none
            raise ValueError(f"its metrics, {log}, are not those that were written with it")
        lines: dict[str, list[dict[str, Any]]] = {}
        for line in read_metrics(log):
            lines.setdefault(check_entries("a line of its metrics", line, run=str)["run"], []).append(line)
        found = []
        for row in about["runs"]:
            name = check_entries("a run", row, name=str)["name"]
            glue = check_entries("glue", row.get("glue", {}))
            result = Result.of({key: value for key, value in row.items() if key not in ("name", "glue")})
            found.append(RunRecord(name, result.settings | _select_main(row), lines.get(name, []), result, glue))
        for row in check_entries("it", about | {"unfinished": about.get("unfinished", [])}, unfinished=list)["unfinished"]:
            name = check_entries("a run", row, name=str, why=str, settings=dict)["name"]
            found.append(RunRecord(name, row["settings"] | _select_main(row["settings"]), lines.get(name, []), why=row["why"]))
        if len({run.name for run in found}) < len(found):
            raise ValueError("a name is there twice")
    except (OSError, KeyError, ValueError) as error:
        words = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"runs must be folders, or files that `shaped collect` made, got {path}: {words}") from None
    return found


def collect(runs: Sequence[RunRecord], out: Path, **about: Any) -> dict[str, Any]:
    """One file with all runs, and one of the same name, ending in .jsonl, with all their metrics; as docs/results keeps them."""
    log = check_out(out)
    finished = [run for run in runs if run.result is not None]
    lines = "".join(json.dumps({"run": run.name} | _round(line)) + "\n" for run in runs for line in run.metrics).encode()
    summary = about | {
        "log": log.name,
        "log_sha256": hashlib.sha256(lines).hexdigest(),
        "runs": [{"name": run.name} | run.result.to_dict() | ({"glue": run.glue} if run.glue else {}) for run in finished if run.result],
        "unfinished": [{"name": run.name, "why": run.why, "settings": run.settings} for run in runs if run.result is None],
    }
    write_atomically(log, lambda file: file.write(lines))
    write_sealed(out, summary)
    return summary


def check_out(out: Path) -> Path:
    """The file of the metrics, beside this one. Refuses what `collect` could not write."""
    if out.suffix != ".json":
        raise ValueError(f"out must end in .json, since the metrics go to a file that ends in .jsonl, got {out}")
    log = out.with_suffix(".jsonl")
    check_writable(out.parent, files=(log.name, out.name))
    return log


def _select_main(row: dict[str, Any]) -> dict[str, Any]:
    """The settings that a result repeats outside of `settings`."""
    return {name: row[name] for name in MAIN}


def _round(value: Any) -> Any:
    """Rounds numbers to six digits: enough to draw and to compare, in half the space."""
    if isinstance(value, dict):
        return {name: _round(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_round(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
