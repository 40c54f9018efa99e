"""`shaped pretrain`: masked language modelling, from settings to a folder that `AutoModelForMaskedLM` loads."""

from __future__ import annotations

import math
import shutil
import signal
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import transformers

import shaped.hf
from shaped.files import sha256, write_sealed
from shaped.train.data import prepare as data
from shaped.train.data.masking import Batches
from shaped.train.folder_lock import alone
from shaped.train.run import checkpoint, diagnostics
from shaped.train.run.folder import HISTORY, check_files, claim, computed, refuse_other, write_settings
from shaped.train.run.metrics import Metrics, read
from shaped.train.run.processes import is_first, processes
from shaped.train.run.result import Result, command_line, commit
from shaped.train.run.settings import Settings
from shaped.train.step.objectives import MaskedLoss
from shaped.train.step.stepper import How, Plan, Say, Stepper

OBSERVED_ROWS = 8
LAST = 500  # steps over which the training loss of a result is averaged

Steppers = dict[Any, Stepper]


class Diverged(ArithmeticError):
    """A loss that is not finite."""


class Stopped(Exception):
    """The time was up, or someone interrupted; there is a checkpoint."""


def pretrain(settings: Settings, *, say: Say = print, progress: bool = False, steppers: Steppers | None = None) -> Result:
    """Trains, or goes on with, the run in `settings.out`, and returns its result; `Stopped` if the time is up before.

    `steppers` are reused by runs of the same shapes in one process: nothing is then compiled again.
    """
    done = settings.out / "result.json"
    with alone(settings.out) if is_first() and not done.exists() else nullcontext():
        if is_first():
            claim(settings)
        if done.exists():
            check_files(settings.out)
            return Result.read(done)
        with processes(settings.device) as (rank, world):
            say = say if rank == 0 else (lambda _: None)
            try:
                return Run(settings, rank, world, say, progress and rank == 0, {} if steppers is None else steppers).finish()
            except Diverged as error:
                if rank == 0:
                    write_sealed(settings.out / "diverged.json", {"why": str(error), "settings": computed(settings)})
                raise


def build(settings: Settings, vocab: int, length: int) -> shaped.hf.ShapedForMaskedLM:
    """The model at initialisation: a function of the settings and the seed."""
    config = shaped.hf.ShapedConfig(
        vocab_size=vocab,
        hidden_size=settings.width,
        num_hidden_layers=settings.depth,
        num_attention_heads=settings.heads,
        intermediate_size=settings.hidden,
        max_position_embeddings=length,
        block=settings.model,
        gamma=settings.gamma,
        gamma_feedforward=settings.gamma_feedforward,
        tau0=settings.tau0,
        c_minus=settings.c_minus,
        activation=settings.activation,
        schedule=settings.schedule,
        recover_steps=settings.recover_steps,
        train_gains=settings.train_gains,
        embedding_norm=settings.embedding_norm,
        embedding_std=settings.embedding_std,
        head_std=settings.head_std,
        tie_word_embeddings=settings.tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return shaped.hf.ShapedForMaskedLM(config)


def shared(steppers: Steppers, model: Any, loss: Any, how: How, sizes: tuple[int, ...], say: Say) -> Stepper:
    """A stepper for this model: one that was made for a model of the same program, or a new one."""
    config = model.config
    negative = config.c_minus < -math.sqrt(config.hidden_size)  # slopes, for which a block's passes are others
    kinds = (loss, config.block, config.activation, config.schedule == "learn", config.train_gains, config.embedding_norm, negative)
    tied = config.tie_word_embeddings and getattr(model, "head_scale", True)  # that constant is part of the program
    shape = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.intermediate_size, config.vocab_size)
    key = (how, kinds, tied, shape, config.max_position_embeddings, sizes)
    if key in steppers:
        steppers[key].adopt(model)
    else:
        steppers[key] = Stepper(model, loss, how, say)
    return steppers[key]


class Run:
    def __init__(self, settings: Settings, rank: int, world: int, say: Say, progress: bool, steppers: Steppers):
        self.settings, self.rank, self.say, self.progress = settings, rank, say, progress
        self.out, self.began = settings.out, time.monotonic()
        self.data = data.load(settings.data)
        self.data.verify(tokenizer=settings.save_model)
        self.hashes = {part: self.data.facts[part]["sha256"] for part in ("train", "valid")}
        self.how = How.of(settings, world)
        where: dict[str, Any] = {
            "batch": settings.batch,
            "share": settings.mask_share,
            "rank": rank,
            "world": world,
            "device": self.how.device,
        }
        self.batches = Batches.of(self.data, "train", seed=settings.seed, **where)
        if len(self.data.rows("valid")) < settings.batch:
            raise ValueError(f"batch must be at most the rows of the test text, {len(self.data.rows('valid'))}, got {settings.batch}")
        self.test = Batches.of(self.data, "valid", seed=0, **where)  # the same order and masks for every run
        self.model = build(settings, self.data.vocab, self.data.length)
        self.plan = Plan(
            settings.learning_rate,
            {
                "gains": settings.gain_lr,
                "shaping": settings.shaping_lr,
                "embeddings": settings.embedding_lr,
                "head": settings.head_lr,
            },
            self.model.config.shaping().share,
            settings.clip,
        )
        sizes = (self.batches.length, self.batches.masked, settings.batch)
        self.stepper = shared(steppers, self.model, MaskedLoss, self.how, sizes, say)
        self._before = 0.0  # seconds until the checkpoint that the run goes on from
        self._losses: list[float] = []  # those that the next line of metrics is the mean of
        self.step, written = self._resume()
        if rank == 0:  # now that they are known to be those of what is here
            write_settings(settings)
        self.metrics = Metrics(self.out, self.step, settings.tensorboard, say, written) if rank == 0 else None

    def _resume(self) -> tuple[int, int]:
        """The step that the run goes on from, and how many lines its metrics had by then."""
        found = checkpoint.latest(self.out / "checkpoints", self.say, layout=dict, data=dict, losses=list, settings=str)
        if found is None:
            return 0, 0
        state, about = found
        refuse_other(Settings.of(tomllib.loads(about["settings"])), self.settings)  # settings.toml may have been lost or damaged
        if about["layout"] != self.stepper.layout() or not self.stepper.fits(state):
            raise ValueError(f"checkpoints must be of this model, got other names or shapes in {self.out}")
        if about["data"] != self.hashes:
            raise ValueError(f"data must be what the run in {self.out} was trained on so far, got other text in {self.settings.data}")
        if about["step"] > self.settings.steps or not all(isinstance(loss, int | float) for loss in about["losses"]):
            raise ValueError(f"checkpoints must be of a run of {self.settings.steps} steps, with its losses, got other ones in {self.out}")
        self.stepper.load(state, about["step"])
        self._losses = about["losses"]
        spent, written = about.get("seconds"), about.get("metrics")  # which older checkpoints do not have
        self._before = spent if isinstance(spent, float) else 0.0
        self.say(f"going on from step {about['step']} of {self.settings.steps}")
        return about["step"], written if isinstance(written, int) else 0

    def finish(self) -> Result:
        settings = self.settings
        try:
            with bar(self.progress, settings.steps, self.step) as show, interruptions() as asked:
                while self.step < settings.steps:
                    self._advance(show)
                    late = settings.minutes is not None and time.monotonic() - self.began > 60 * settings.minutes
                    if self._agreed(late or bool(asked)) and self.step < settings.steps:
                        self.save()
                        why = "interrupted" if asked else "the time is over"
                        after = "goes on from there" if settings.keep else "begins anew, since no checkpoints are kept"
                        raise Stopped(f"{why} at step {self.step} of {settings.steps}; the same command {after}")
            self._complete()
        finally:
            if self.metrics is not None:
                self.metrics.close()
        return self._export()

    def _advance(self, show: Callable[..., None]) -> None:
        """To the next step at which something is to be done, or to the end of a chunk."""
        settings, began = self.settings, time.monotonic()
        intervals = (settings.evaluate_every, settings.observe_every, settings.checkpoint_every)
        count = min(self.how.chunk, settings.steps - self.step, *(every - self.step % every for every in intervals))
        batches = self.batches.chunk(self.step, count)
        losses = self.stepper.run(batches, self.plan)
        if self.stepper.step != self.step + count:
            self._report_divergence(batches, losses)
        seconds = time.monotonic() - began
        tokens = count * settings.batch * self.data.length / seconds
        for loss in losses:
            self.step += 1
            self._losses = [*self._losses, loss][-settings.log_every :]
            if self.step % settings.log_every == 0 or self.step == settings.steps:
                self._write_losses(tokens_per_second=tokens)
        self.stepper.set_share(self.plan.share(self.step))  # looks, test losses and checkpoints see the model as the next step would
        show(self.step, losses[-1], tokens)
        last = self.step == settings.steps
        if self.step % settings.observe_every == 0 or last:
            ids = self.test.chunk(0, 1)[0][0, :OBSERVED_ROWS]
            self._write("layers", **diagnostics.observe(self.model, ids, self.stepper.gradients()))
        if self.step % settings.evaluate_every == 0 or last:
            loss = self._write_test(None if last else settings.test_rows)
            if not self.progress:
                self.say(f"step {self.step}: train loss {losses[-1]:.4f}, test loss {loss:.4f}, {tokens:,.0f} tokens/s")
        if self.step % settings.checkpoint_every == 0 or last:
            self.save()

    def _write(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(self.step, kind, **values)

    def _write_losses(self, **speed: float) -> None:
        """The mean over the steps since such a line was last due."""
        every = self.settings.log_every
        window = self._losses[-(self.step % every or every) :]
        rate = self.settings.learning_rate(self.step - 1)
        self._write("train", loss=sum(window) / len(window), lr=rate, count=len(window), **speed)

    def _write_test(self, rows: int | None) -> float:
        loss = self.test_loss(rows)
        if not math.isfinite(loss):
            raise Diverged(f"the test loss after step {self.step} is not finite, {self._last_good()}")
        self._write("test", loss=loss)
        return loss

    def _complete(self) -> None:
        """Makes the last step's losses again where the metrics lack them: a power cut may cost lines of a step whose checkpoint is kept."""
        there = {line["kind"] for line in read(self.out / "metrics.jsonl") if line["step"] == self.step}
        if "train" not in there and self._losses:
            self._write_losses()
        if self._agreed("test" not in there):
            self._write_test(None)
            if dist.is_initialized():
                dist.barrier()

    def test_loss(self, rows: int | None = None) -> float:
        """The mean over the test text, or its first rows, with the same masks for every run; rows that fill no batch are left out."""
        count = self.test.steps_an_epoch
        if rows is not None:
            count = max(1, min(count, rows // self.settings.batch))
        total = torch.zeros((), device=self.how.device)
        for first in range(0, count, self.how.chunk):
            chunk = self.test.chunk(first, min(self.how.chunk, count - first))
            for batch in zip(*chunk, strict=True):
                with self.stepper.cast():  # with gradients, though nobody asks for them: without, all would be compiled again
                    total += self.stepper.loss(*batch).detach()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        return float(total) / count

    def _seconds(self) -> float:
        """That the run has taken, over all commands that went on with it."""
        return round(self._before + time.monotonic() - self.began, 1)

    def save(self) -> None:
        if self.rank == 0 and self.settings.keep:
            about = {"layout": self.stepper.layout(), "settings": self.settings.to_toml(), "data": self.hashes, "losses": self._losses}
            about |= {"seconds": self._seconds(), "metrics": 0 if self.metrics is None else self.metrics.count}
            checkpoint.save(self.out / "checkpoints", self.step, self.stepper.state(), about, self.settings.keep)
        if dist.is_initialized():
            dist.barrier()

    def _report_divergence(self, batches: tuple[torch.Tensor, ...], losses: list[float]) -> None:
        """Nothing moved after the step that broke: it can be computed again."""
        step = self.stepper.step
        batch = tuple(tensor[step - self.step] for tensor in batches)

        def again() -> torch.Tensor:
            with self.stepper.cast():
                return self.stepper.eager_loss(*batch)

        if math.isfinite(losses[step - self.step]):
            broken, place = "a gradient", diagnostics.last_non_finite(self.model, self.stepper.gradients_of(batch))
        else:
            broken, place = "the loss", diagnostics.first_non_finite(self.stepper.twin, again)
        raise Diverged(f"{broken} of step {step} is not finite: it began in {place}; {self._last_good()}")

    def _last_good(self) -> str:
        kept = checkpoint.found(self.out / "checkpoints")
        return f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"

    def _agreed(self, stop: bool) -> bool:
        """Does any process want to stop? Then all do, at the same step."""
        if dist.is_initialized():
            flag = torch.tensor(float(stop), device=self.how.device)
            dist.all_reduce(flag)
            stop = bool(flag > 0)
        return stop

    def _export(self) -> Result:
        """The finished run as Hugging Face keeps models: weights, config, tokenizer; and result.json, last."""
        test = [line for line in read(self.out / "metrics.jsonl", "test") if line["step"] == self.settings.steps]
        lines = read(self.out / "metrics.jsonl", "train")
        if not test or not lines:
            raise ValueError(f"metrics must have the losses of the last step, got none in {self.out}: delete it to begin anew")
        last = [line for line in lines if line["step"] > self.settings.steps - LAST] or lines[-1:]
        count = sum(line["count"] for line in last)
        result = Result(
            **{name: getattr(self.settings, name) for name in ("model", "schedule", "depth", "width", "steps", "lr", "gamma", "seed")},
            train_loss=sum(line["loss"] * line["count"] for line in last) / count,
            test_loss=test[-1]["loss"],
            command=command_line(self.settings),
            commit=commit(),
            settings={name: value for name, value in asdict(self.settings).items() if name not in ("out", "data", "minutes")},
            data=self.hashes,
            device=torch.cuda.get_device_name() if self.how.device.type == "cuda" else "cpu",
            seconds=self._seconds(),
        )
        if self.rank == 0:
            written = list(HISTORY)
            if self.settings.save_model:
                transformers.utils.logging.disable_progress_bar()
                values = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}  # no longer views
                with checkpoint.tensors_in(self.out):
                    self.model.save_pretrained(self.out, state_dict=values)
                tokenizer = self.data.tokenizer_files()
                for name in tokenizer:
                    shutil.copy2(self.data.folder / "tokenizer" / name, self.out)
                written += ["config.json", *(path.name for path in self.out.glob("*.safetensors*")), *tokenizer]
            (self.out / "diverged.json").unlink(missing_ok=True)  # at another time
            write_sealed(self.out / "result.json", result.to_dict() | {"files": {name: sha256(self.out / name) for name in written}})
        if dist.is_initialized():
            dist.barrier()
        return result


@contextmanager
def interruptions() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM, to be heeded between chunks, where a checkpoint is of one step. A second one is not waited for."""
    asked: list[int] = []

    def heard(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, heard) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def bar(wanted: bool, steps: int, done: int) -> Iterator[Callable[[int, float, float], None]]:
    """Loss, tokens a second and time left, on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    speed = TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]} tokens/s")
    columns = (MofNCompleteColumn(), BarColumn(), speed, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not wanted) as progress:
        task = progress.add_task("", total=steps, completed=done, loss=float("nan"), rate="")
        yield lambda step, loss, rate: progress.update(task, completed=step, loss=loss, rate=f"{rate:,.0f}")
