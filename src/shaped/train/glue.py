"""`shaped glue`: fine-tunes a finished run on CoLA, MRPC or RTE, over several seeds, and scores it on the development set."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

import shaped.hf
from shaped.checks import in_range, positive, whole_number
from shaped.files import check_writable, read_json, read_text, write_sealed
from shaped.hf.quiet import silence_transformers
from shaped.process import quote_error
from shaped.train.run.folder import HISTORY, check_files, check_run_folder
from shaped.train.run.model import check_size
from shaped.train.run.options import check, option
from shaped.train.run.result import Result, find_commit
from shaped.train.run.settings import copy_option
from shaped.train.run.stopping import Diverged
from shaped.train.step.config import StepConfig, StepSchedule
from shaped.train.step.learning_rates import compute_learning_rate
from shaped.train.step.objectives.classification import ClassifierLoss, ExampleBatches
from shaped.train.step.stepper import Log, Stepper
from shaped.train.step.stepper_cache import StepperCache

Example = tuple[str, str | None, int]


@dataclass(frozen=True)
class Task:
    """Where a task's columns are in its TSV files, in which quotes are plain characters, and in `datasets`."""

    folder: str
    header: bool
    label: int
    texts: tuple[int, ...]
    labels: dict[str, int]
    score: str
    columns: tuple[str, ...]


TASKS = {
    "cola": Task("CoLA", False, 1, (3,), {"0": 0, "1": 1}, "matthews", ("sentence",)),
    # The paper does not name MRPC's score. Always answering 1 has F1 0.812 and accuracy 0.684: the paper's 0.785 to 0.813 must be F1.
    "mrpc": Task("MRPC", True, 0, (3, 4), {"0": 0, "1": 1}, "f1", ("sentence1", "sentence2")),
    "rte": Task("RTE", True, 3, (1, 2), {"entailment": 0, "not_entailment": 1}, "accuracy", ("sentence1", "sentence2")),
}


@dataclass(frozen=True)
class GlueSettings:
    """The paper's protocol; `warmup` is a share of the steps."""

    task: str = option(MISSING, "Task.", topic="data", choices=tuple(TASKS))
    epochs: int = option(5, "Epochs.", topic="optimisation", least=1, most=1000)
    lr: float = option(5e-4, "Learning rate.", topic="optimisation", low=0.0)
    batch: int = option(16, "Examples of a step.", topic="data", least=1)
    warmup: float = option(0.0, "Share of the steps in which the learning rate grows.", topic="optimisation", low=0.0)
    seeds: tuple[int, ...] = option((0, 1, 2), "Seeds of the head and of the order of the examples.", topic="optimisation")
    optimiser: str = copy_option("optimiser")
    clip: float = copy_option("clip")
    device: str = copy_option("device")
    precision: str = copy_option("precision")
    stream: str = copy_option("stream")
    compile: str = copy_option("compile")
    graph: str = copy_option("graph")
    attention: str = copy_option("attention")

    def __post_init__(self) -> None:
        check(self)
        positive("lr", self.lr)
        for seed in self.seeds:
            whole_number("seeds", seed, least=0, most=(1 << 63) - 1)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be at least one and none twice, got {', '.join(map(str, self.seeds)) or 'none'}")
        in_range("warmup", self.warmup, 0.0, 1.0)


def read_tsv(task: Task, path: Path) -> list[Example]:
    """The examples of a GLUE file: text, second text or None, label."""
    try:
        text = read_text(path).removeprefix("\ufeff")
    except FileNotFoundError:
        raise ValueError(f"data must have {task.folder}/{path.name}, got none at {path}") from None
    except ValueError as error:
        raise ValueError(f"data must have {task.folder}/{path.name} as GLUE has it, got something else: {error}") from None
    rows = text.rstrip("\n").split("\n")[task.header :]  # not splitlines: sentences may contain other line ends
    examples = []
    for number, row in enumerate(rows, 1 + task.header):
        if not row.strip():
            continue
        cells = row.rstrip("\r").split("\t")
        if len(cells) <= max(task.label, *task.texts) or cells[task.label] not in task.labels:
            raise ValueError(
                f"{path.name} must have labels {', '.join(task.labels)} in column {task.label + 1}, got line {number}: {row[:60]!r}"
            )
        first, second = (*(cells[i] for i in task.texts), None)[:2]
        examples.append((str(first), second, task.labels[cells[task.label]]))
    if not examples:
        raise ValueError(f"{path.name} must have examples, got none")
    return examples


def read_examples(name: str, part: str, folder: Path | None) -> list[Example]:
    """From FOLDER/CoLA/train.tsv and so on, or, without a folder, by `datasets`."""
    task = TASKS[name]
    if folder is not None:
        return read_tsv(task, folder / task.folder / f"{part}.tsv")
    try:
        from datasets import load_dataset

        rows = load_dataset("nyu-mll/glue", name, split={"train": "train", "dev": "validation"}[part])
    except Exception as error:
        raise ValueError(f"data must be a folder with GLUE's TSV files where the hub cannot be reached, got none ({error})") from None
    made: list[Example] = []
    for row in rows:
        cells: dict[str, Any] = dict(row)
        texts = [str(cells[column]) for column in task.columns]
        made.append((texts[0], texts[1] if len(texts) > 1 else None, int(cells["label"])))
    return made


def encode(texts: list[Example], tokenizer: Any, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and mask, padded on the right to `length`, and labels. Positions count from the left, so that a text begins at 0."""
    firsts, seconds = [text[0] for text in texts], [text[1] for text in texts]
    pairs = (firsts,) if seconds[0] is None else (firsts, seconds)
    made = tokenizer(*pairs, padding="max_length", padding_side="right", truncation=True, max_length=length, return_tensors="pt")
    return made["input_ids"], made["attention_mask"].bool(), torch.tensor([text[2] for text in texts])


def glue(
    run: Path, settings: GlueSettings, folder: Path | None, *, log: Log = print, steppers: StepperCache | None = None
) -> dict[str, Any]:
    """Scores of the task on the development set, over seeds; also written to RUN/glue-TASK.json.

    `steppers` are shared by runs and tasks of the same shapes in one process: nothing is then compiled again.
    """
    result = Result.read(check_run(run, settings.task) / "result.json")
    check_files(run, lambda name: name not in HISTORY)
    check_config(run, result)
    with explain_errors(run):
        tokenizer: Any = AutoTokenizer.from_pretrained(run)
        about = shaped.hf.ShapedConfig.from_pretrained(run)
    length = about.max_position_embeddings
    check_size(about, settings.device)
    tokenizer.model_max_length = 1 << 30  # texts are truncated below
    parts = {part: read_examples(settings.task, part, folder) for part in ("train", "dev")}
    config, steppers = StepConfig.of(settings, 1), StepperCache() if steppers is None else steppers
    if config.compile == "off":  # compiled, one length for all tasks: one program
        length = min(length, _round_up(max(map(len, tokenizer(*_list_texts(parts))["input_ids"]))))
    train, dev = (encode(parts[part], tokenizer, length) for part in ("train", "dev"))
    if len(train[0]) < settings.batch:
        raise ValueError(f"batch must be at most the number of examples, {len(train[0])}, got {settings.batch}")
    scores: list[dict[str, float]] = []
    for seed in settings.seeds:
        model = load_classifier(run, seed)
        batches = ExampleBatches(train, batch=settings.batch, seed=seed, device=config.device)
        stepper = steppers.get(model, ClassifierLoss, config, batches.sizes, log)
        fine_tune(stepper, settings, batches, model.config.shaping().share(result.steps))
        scores.append(score(predict(stepper, dev, settings.batch), dev[2].numpy()))
        log(f"{settings.task}, seed {seed}: " + ", ".join(f"{name} {value:.3f}" for name, value in scores[-1].items()))
    summary: dict[str, Any] = {"task": settings.task, "score": TASKS[settings.task].score, "seeds": list(settings.seeds)}
    for name in scores[0]:
        values = [one[name] for one in scores]
        summary[name] = {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else None, "values": values}
    summary |= {"precision": "bf16" if config.half else "float32", "stream": str(config.stream).removeprefix("torch.")}
    summary |= {"epochs": settings.epochs, "lr": settings.lr, "batch": settings.batch, "warmup": settings.warmup, "length": length}
    summary |= {"examples": {part: len(parts[part]) for part in parts}, "run": result.command, "commit": find_commit()}
    write_sealed(run / name_scores(settings.task), summary)
    return summary


def name_scores(task: str) -> str:
    """The file of a run that has its scores on a task."""
    return f"glue-{task}.json"


def check_run(run: Path, *tasks: str) -> Path:
    """A finished run into whose folder the scores of these tasks can be written."""
    check_writable(check_run_folder(run), "run", map(name_scores, tasks))
    return run


def check_config(run: Path, result: Result) -> None:
    """Compares config.json with the result before a model is built, since a damaged one may ask for any size."""
    about = read_json(run / "config.json", num_hidden_layers=int, hidden_size=int, vocab_size=int, max_position_embeddings=int)
    for name, value in (("num_hidden_layers", result.depth), ("hidden_size", result.width)):
        if about[name] != value:
            raise ValueError(f"run must have a model of {name} {value}, as its result says, got {about[name]} in {run / 'config.json'}")


@contextmanager
def explain_errors(run: Path) -> Iterator[None]:
    """Turns any error of transformers in a damaged file into one line."""
    try:
        yield
    except Exception as error:
        said = quote_error(error)
        raise ValueError(f"run must have a model and a tokenizer that can be read, got {run}: {type(error).__name__}, {said}") from None


def load_classifier(run: Path, seed: int) -> Any:
    """The run's body under a new linear head, which the seed draws."""
    with silence_transformers(), explain_errors(run), torch.random.fork_rng(devices=[]):  # no warning that the head is new
        torch.manual_seed(seed)
        return shaped.hf.ShapedForSequenceClassification.from_pretrained(run, num_labels=2)


def fine_tune(stepper: Stepper, settings: GlueSettings, batches: ExampleBatches, share: float) -> None:
    """Trains for the settings' epochs, with the shaping at a constant share of its start."""
    steps = settings.epochs * batches.steps_an_epoch
    warmup = round(settings.warmup * steps)
    rate = partial(compute_learning_rate, lr=settings.lr, warmup=warmup, steps=steps, decay="none")
    schedule = StepSchedule(rate, {}, lambda _: share, settings.clip)
    for first in range(0, steps, stepper.config.chunk):
        losses = stepper.run(batches.chunk(first, min(stepper.config.chunk, steps - first)), schedule)
        if not all(map(math.isfinite, losses)):
            raise Diverged(f"the loss of step {stepper.step} of fine-tuning is not finite (seed {batches.seed}); lr is {settings.lr:g}")


@torch.no_grad()
def predict(stepper: Stepper, examples: tuple[Tensor, ...], batch: int) -> np.ndarray:
    """The classes of examples: tokens, masks."""
    loss: Any = stepper.eager_loss
    classes = []
    for first in range(0, len(examples[0]), 8 * batch):
        ids, mask = (tensor[first : first + 8 * batch].to(stepper.config.device) for tensor in examples[:2])
        with stepper.forward_context():
            logits = loss.logits(loss.encode(ids, mask[:, None, None, :]), mask).float()
        if not logits.isfinite().all():
            raise Diverged("the fine-tuned model's logits are not finite: the learning rate may be too large")
        classes.append(logits.argmax(-1).cpu().numpy())
    return np.concatenate(classes)


def score(predicted: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Matthews correlation, accuracy and F1 of class 1, from the four counts; 0 where a denominator is."""
    tp, tn = int(((predicted == 1) & (truth == 1)).sum()), int(((predicted == 0) & (truth == 0)).sum())
    fp, fn = int(((predicted == 1) & (truth == 0)).sum()), int(((predicted == 0) & (truth == 1)).sum())
    below = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    return {
        "matthews": (tp * tn - fp * fn) / below if below else 0.0,
        "accuracy": (tp + tn) / len(truth),
        "f1": 2 * tp / (2 * tp + fp + fn) if tp else 0.0,
    }


def _list_texts(parts: dict[str, list[Example]]) -> tuple[list[str], ...]:
    every = [text for part in parts.values() for text in part]
    return ([text[0] for text in every],) if every[0][1] is None else ([text[0] for text in every], [str(text[1]) for text in every])


def _round_up(length: int) -> int:
    return -(-length // 32) * 32
