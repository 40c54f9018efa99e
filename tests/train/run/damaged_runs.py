"""The folders of training that are damaged, the commands that read them, and what each should answer."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from damage import Outcome, command, damage, judge

SETTINGS: dict[str, Any] = {
    "depth": 2, "width": 16, "heads": 2, "gamma": 0.5, "batch": 4, "steps": 12, "warmup": 2, "recover_steps": 4, "lr": 1e-2,
    "log_every": 2, "evaluate_every": 4, "observe_every": 4, "checkpoint_every": 4, "tensorboard": False, "device": "cpu",
}  # fmt: skip


USUAL = r"^step \d+: train loss|^going on from step|: train .* steps, .* s\)$|^\d+ finished, "
"""Lines that tell how a run goes."""


class Place:
    """A text, prepared; a finished run with scores, one that was stopped, and both in one file."""

    def __init__(self, folder: Path):
        self.right, self.work = folder / "right", folder / "work"
        self._make()
        self.answers: dict[str, Outcome] = {}

    def _make(self) -> None:
        """Everything is made in `work`, whose name is in what commands say, and then kept in `right`."""
        self.work.mkdir(parents=True)
        generator = np.random.default_rng(0)
        words = np.array([consonant + vowel for consonant in "bdfgkl" for vowel in "aeiou"])
        documents = [" ".join(generator.choice(words, 14)) for _ in range(60)]
        (self.work / "text.txt").write_text("\n\n".join(documents) + "\n")
        (self.work / "glue" / "RTE").mkdir(parents=True)
        for part in ("train", "dev"):
            rows = [f"{i}\t{documents[i][:20]}\t{documents[-i][:20]}\t{('entailment', 'not_entailment')[i % 2]}" for i in range(16)]
            (self.work / "glue" / "RTE" / f"{part}.tsv").write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *rows]) + "\n")
        runs = self.work / "runs"
        lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in SETTINGS.items())
        (self.work / "settings.toml").write_text(f'data = "{self.work / "data"}"\n{lines}')
        queue = '[[run]]\nname = "finished"\n[[run]]\nname = "unfinished"\nseed = 1\n'
        (self.work / "study.toml").write_text(f'out = "{runs}"\n[defaults]\ndata = "{self.work / "data"}"\n{lines}{queue}')
        for name in ("prepare", "pretrain finished", "glue", "stop", "stop", "keep"):
            made = COMMANDS[name](self)
            if made.status not in (0, 75) or made.escaped:
                raise AssertionError(f"{name}: {made}")
        self._fresh(self.right, self.work)

    def try_damage(self, generator: np.random.Generator) -> tuple[str, str]:
        """Damages one file of one of the folders, runs one of the commands that read it, and judges what it did."""
        target = list(READ)[generator.integers(len(READ))]
        name = READ[target][generator.integers(len(READ[target]))]
        if name not in self.answers:
            self._fresh(self.work, self.right)
            self.answers[name] = COMMANDS[name](self)
        self._fresh(self.work, self.right)
        what = damage(self.work / target, generator)
        found = COMMANDS[name](self)
        outcome = judge(found, self.answers[name])
        if outcome.startswith("WRONG: another answer") and is_absence(target, what, name):
            outcome = "absent: read as a run that never wrote that file"
        return f"{target}/{what}; {name}", outcome

    def _fresh(self, to: Path, source: Path) -> None:
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(source, to, symlinks=True)

    def call(self, *arguments: str, answer: Callable[[], Any] | None = None) -> Outcome:
        made = command([word.replace("@", str(self.work)) for word in arguments])
        if arguments[0] == "study":  # it says on standard output how its runs go
            made = replace(made, errors=(*made.errors, *made.answer.splitlines()))
        made = replace(made, errors=tuple(line for line in made.errors if not re.search(USUAL, line)))
        told = made.answer if answer is None else (answer() if made.status in (0, 1, 75) and not made.escaped else None)
        return replace(made, answer=told)

    def run(self, name: str) -> Any:
        """What a run came to: its losses, its curve and its weights."""
        folder = self.work / "runs" / name
        result = json.loads((folder / "result.json").read_text())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        curve = [{key: value for key, value in line.items() if key not in ("tokens_per_second", "crc32")} for line in lines]
        weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        return {"losses": [result["train_loss"], result["test_loss"]], "curve": curve, "weights": weights}

    def study(self) -> Any:
        about = json.loads((self.work / "runs" / "study.json").read_text())
        rows = [[run["name"], run["train_loss"], run["test_loss"], run.get("glue")] for run in about["runs"]]
        return {"runs": rows, "unfinished": about["unfinished"], "failed": list(about["failed"])}

    def pages(self) -> Any:
        made = [json.loads((self.work / "out" / f"{id}.json").read_text()) for id in ("fig6", "table1", "table2")]
        return [[page["claims"], page["table"]] for page in made]

    def files(self, folder: str, *names: str) -> Any:
        """What is in them: of JSON that without its seal, which a file from before there were seals does not have."""
        paths = [path for path in sorted((self.work / folder).rglob("*")) if path.is_file() and (not names or path.name in names)]
        return {str(path.relative_to(self.work)): content(path) for path in paths}


def content(path: Path) -> Any:
    if path.suffix == ".json":
        return {name: value for name, value in json.loads(path.read_text()).items() if name != "seal"}
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_absence(target: str, what: str, name: str) -> bool:
    """Without result.json a run is unfinished, without glue-rte.json it has no scores: no one can tell that from what never was."""
    return what.endswith(": deleted") and what.split(":")[0] in ("result.json", "glue-rte.json")


def pretrain(run: str, *more: str) -> Callable[[Place], Outcome]:
    seed = "0" if run == "finished" else "1"
    given = ("pretrain", "--config", "@/settings.toml", "--seed", seed, "--out", f"@/runs/{run}", *more)
    return lambda place: place.call(*given, answer=None if more else lambda: place.run(run))


COMMANDS: dict[str, Callable[[Place], Outcome]] = {
    "prepare": lambda place: place.call(
        "data", "prepare", "--text", "@/text.txt", "--vocab", "60", "--length", "16", "--valid-share", "0.2", "--out", "@/data",
        answer=lambda: place.files("data"),
    ),
    "pretrain finished": pretrain("finished"),
    "pretrain unfinished": pretrain("unfinished"),
    "pretrain new": pretrain("new"),
    "stop": pretrain("unfinished", "--minutes", "0"),
    "glue": lambda place: place.call("glue", "@/runs/finished", "--task", "rte", "--data", "@/glue", "--epochs", "1", "--seeds", "0,1"),
    "collect": lambda place: place.call(
        "collect", "@/runs/finished", "@/runs/unfinished", "--out", "@/collected.json",
        answer=lambda: place.files(".", "collected.json", "collected.jsonl"),
    ),
    "keep": lambda place: place.call("collect", "@/runs", "--out", "@/kept/kept.json"),
    "collect kept": lambda place: place.call(
        "collect", "@/kept/kept.json", "--out", "@/again.json", answer=lambda: place.files(".", "again.json", "again.jsonl")
    ),
    "reproduce": lambda place: place.call(
        "reproduce", "fig6", "table1", "table2", "--runs", "@/runs", "--workers", "1", "--out", "@/out", answer=place.pages
    ),
    "reproduce kept": lambda place: place.call(
        "reproduce", "fig6", "table1", "table2", "--runs", "@/kept/kept.json", "--workers", "1", "--out", "@/out", answer=place.pages
    ),
    "study": lambda place: place.call("study", "@/study.toml", answer=place.study),
}  # fmt: skip
READ = {
    "runs/finished": ("pretrain finished", "glue", "collect", "reproduce", "study"),
    "runs/unfinished": ("pretrain unfinished", "pretrain unfinished", "collect", "reproduce", "study"),
    "data": ("prepare", "prepare", "pretrain new", "pretrain unfinished"),
    "kept": ("collect kept", "reproduce kept"),
}
"""The folders, and the commands that read each. Those that cost most stand there once."""
