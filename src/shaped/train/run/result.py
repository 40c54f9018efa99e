"""A finished run in one row, and the command and the commit that made it."""

from __future__ import annotations

import os
import shlex
import subprocess
import typing
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from shaped.files import check_entries, read_json, sha256, write_sealed
from shaped.nn.blocks import BLOCKS
from shaped.train.run.options import read_hints
from shaped.train.run.settings import PRESETS, Settings

LAST = 500  # steps over which the training loss of a result is averaged
MAIN = ("model", "schedule", "depth", "width", "steps", "lr", "gamma", "seed")  # settings that a result repeats outside of `settings`


@dataclass(frozen=True)
class Result:
    """A finished run in one row."""

    model: str
    schedule: str
    depth: int
    width: int
    steps: int
    lr: float
    gamma: float
    seed: int
    train_loss: float
    test_loss: float
    command: str
    commit: str
    settings: dict[str, Any] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    device: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `of` reads it."""
        return asdict(self)

    @classmethod
    def of(cls, row: dict[str, Any]) -> Result:
        """From what `to_dict` made; older rows lack the last entries. An error says what is wrong with a row."""
        kinds = {name: typing.get_origin(kind) or kind for name, kind in read_hints(cls).items()}
        if other := sorted(row.keys() - kinds.keys()):
            raise ValueError(f"it has {', '.join(other)}, which no result has")
        later = {about.name for about in fields(cls) if about.default is not MISSING or about.default_factory is not MISSING}
        check_entries("it", row, **{name: kind for name, kind in kinds.items() if name in row or name not in later})
        for name in MAIN:
            if row.get("settings", {}).get(name, row[name]) != row[name]:
                raise ValueError(f"it has two values of {name}, {row[name]} and {row['settings'][name]}")
        check_settings(row.get("settings", {}) | {name: row[name] for name in MAIN})
        return cls(**row)

    @classmethod
    def read(cls, path: Path) -> Result:
        """From the result.json of a run. A damaged file is refused."""
        return read_result(path)[0]

    @property
    def name(self) -> str:
        """The model, or the schedule of a shaped one, as tables name it."""
        return name_kind(self.settings | {"model": self.model, "schedule": self.schedule})


def make_result(settings: Settings, lines: list[dict[str, Any]], **about: Any) -> Result:
    """The result of a run from its settings and the lines of its metrics. `about` are the entries data, device and seconds."""
    test = [line for line in lines if line["kind"] == "test" and line["step"] == settings.steps]
    train = [line for line in lines if line["kind"] == "train"]
    if not test or not train:
        raise ValueError(f"metrics must have the losses of the last step, got none in {settings.out}: delete it to begin anew")
    last = [line for line in train if line["step"] > settings.steps - LAST] or train[-1:]
    return Result(
        **{name: getattr(settings, name) for name in MAIN},
        train_loss=sum(line["loss"] * line["count"] for line in last) / sum(line["count"] for line in last),
        test_loss=test[-1]["loss"],
        command=write_command(settings),
        commit=find_commit(),
        settings=settings.record(),
        **about,
    )


def write_result(result: Result, out: Path, files: list[str]) -> None:
    """Writes result.json, with the hashes of the files that the run wrote before it."""
    write_sealed(out / "result.json", result.to_dict() | {"files": {name: sha256(out / name) for name in files}})


def read_result(path: Path) -> tuple[Result, dict[str, str]]:
    """A result.json: the result, and the hashes of the files that the run wrote before it; older ones have none."""
    try:
        row = read_json(path)
        files = row.pop("files", {})
        check_entries("files", files, **dict.fromkeys(files, str) if isinstance(files, dict) else {})
        return Result.of(row), files
    except ValueError as error:
        raise ValueError(f"{path} must be the result of a run of `shaped pretrain`, got something else: {error}") from None


def check_settings(given: dict[str, Any]) -> None:
    """Refuses settings that no run can have had. Settings that did not exist yet get the values of the preset "paper"."""
    Settings.of({"data": "-", "out": "-"} | PRESETS["paper"] | given)


def check_scores(name: str, scores: Any) -> dict[str, Any]:
    """Refuses what is not the summary that `shaped glue` writes for a task."""
    check_entries(name, scores, task=str, score=str, seeds=list)
    check_entries(name, scores, **{scores["score"]: dict})
    measured = check_entries(f"{scores['score']} of {name}", scores[scores["score"]], mean=float)
    if measured.get("std") is not None:
        check_entries(f"{scores['score']} of {name}", measured, std=float)
    if not scores["seeds"]:
        raise ValueError(f"{name} must have seeds, got none")
    return scores


def name_kind(settings: dict[str, Any]) -> str:
    """What tables call a run: the schedule, or the kind of block of a baseline; with what the paper's models do not have."""
    model = settings["model"]
    has_rms = settings.get("norm") == "rms" and "norms" in BLOCKS[model].parts
    return (settings["schedule"] if model == "shaped" else model) + "-rms" * has_rms + "-qk" * bool(settings.get("qk_norm"))


def find_commit() -> str:
    """The commit of the code: SHAPED_COMMIT, for code without its history, or that of the checkout. Unknown for an installed copy."""
    if stated := os.environ.get("SHAPED_COMMIT"):
        return stated

    def ask_git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()

    try:
        ask_git("ls-files", "--error-unmatch", Path(__file__).name)  # an environment inside another project has that project's history
        return ask_git("describe", "--always", "--dirty")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_command(settings: Settings) -> str:
    """The command that makes this run, with the options that differ from the defaults. Of folders, only the last name."""
    words = ["shaped", "pretrain"]
    for about in fields(settings):
        value = getattr(settings, about.name)
        if about.name == "minutes" or (about.default is not MISSING and value == about.default):
            continue
        option = about.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", value.name if isinstance(value, Path) else str(value)]
    return shlex.join(words)
