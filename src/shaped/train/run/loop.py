"""`shaped pretrain`: from settings to a folder that the Auto classes of transformers load."""

from __future__ import annotations

import math
import time
import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from shaped.files import write_sealed
from shaped.train.data.prepared import PARTS, Data, load_data
from shaped.train.folder_lock import folder_lock
from shaped.train.run import checkpoint, diagnostics
from shaped.train.run.folder import HISTORY, check_files, claim_folder, record_settings, refuse_other_settings, write_settings, write_toml
from shaped.train.run.metrics import Metrics, read_metrics
from shaped.train.run.model import build_model, write_model
from shaped.train.run.processes import average, is_any, is_first, join_processes, wait_for_all
from shaped.train.run.progress import describe_time, show_progress
from shaped.train.run.result import Result, make_result, write_result
from shaped.train.run.settings import Settings
from shaped.train.run.stopping import Alarmed, Diverged, Stopped, StopRequest, catch_interrupts
from shaped.train.step.config import StepConfig, StepSchedule
from shaped.train.step.objectives import load_objective
from shaped.train.step.stepper import Log
from shaped.train.step.stepper_cache import StepperCache

PATIENCE = 5.0  # seconds that the steps between two looks at the clock and the keyboard may take; a step that takes longer is one such look
SILENCE = 60.0  # seconds after which a line says where the run is
FLOPS = {"cpu": 1e11, "cuda": 1e14}  # operations a second, assumed until steps have been timed
WATCHED_ROWS = 2
OBSERVED_ROWS, OBSERVED_TOKENS = 8, 8192  # at most; observing takes memory for matrices of length x length


def pretrain(settings: Settings, *, log: Log = print, progress: bool = False, steppers: StepperCache | None = None) -> Result:
    """Trains, or goes on with, the run in `settings.out`, and returns its result; `Stopped` if the time is up before.

    `steppers` are reused by runs of the same shapes in one process: nothing is then compiled again.
    """
    if settings.out.resolve() == settings.data.resolve():
        raise ValueError(f"out must be another folder than data, whose files it would mix with its own, got {settings.out} for both")
    done = settings.out / "result.json"
    with folder_lock(settings.out) if is_first() and not done.exists() else nullcontext():
        if is_first():
            claim_folder(settings)
        if done.exists():
            check_files(settings.out)
            result = Result.read(done)
            # Where the data were removed, the run is still finished; results of older versions do not say what they were.
            if result.data and (settings.data.is_file() or (settings.data / "data.json").exists()):
                refuse_other_data(result.data, hash_data(load_data(settings.data)), settings)
            return result
        with join_processes(settings.device) as (rank, world):
            log = log if rank == 0 else (lambda _: None)
            try:
                return Run(settings, rank, world, log, progress and rank == 0, StepperCache() if steppers is None else steppers).finish()
            except Diverged as error:
                if rank == 0:
                    write_sealed(settings.out / "diverged.json", {"why": str(error), "settings": record_settings(settings)})
                raise


def hash_data(data: Data) -> dict[str, str]:
    return {part: data.facts[part]["sha256"] for part in PARTS}


def refuse_other_data(recorded: dict[str, str], found: dict[str, str], settings: Settings) -> None:
    if recorded != found:
        raise ValueError(f"data must be what the run in {settings.out} was trained on so far, got other text in {settings.data}")


class Run:
    """One run: the objective's model, batches and loss, stepped to the last step.

    `_advance` is the loop's body: a chunk of steps, then whatever is due: a look at the layers, a test loss, a checkpoint.
    """

    def __init__(self, settings: Settings, rank: int, world: int, log: Log, progress: bool, steppers: StepperCache):
        self.settings, self.rank, self.log, self.progress = settings, rank, log, progress
        self.out, self.began = settings.out, time.monotonic()
        self.data = load_data(settings.data)
        self.data.verify(tokenizer=settings.save_model)
        self.hashes = hash_data(self.data)
        self.objective, self.config = load_objective(settings.objective), StepConfig.of(settings, world)
        order: dict[str, Any] = {"batch": settings.batch, "rank": rank, "world": world, "device": self.config.device}
        self.batches = self.objective.batches(self.data, "train", settings, seed=settings.seed, **order)
        if (rows := self.data.facts["valid"]["rows"]) < settings.batch:
            raise ValueError(f"batch must be at most the rows of the test text, {rows}, got {settings.batch}")
        self.test = self.objective.batches(self.data, "valid", settings, seed=0, **order)  # the same for every run
        self.model = build_model(settings, self.objective.model, self.data.vocab, self.data.length)
        self.schedule = StepSchedule(
            lr=settings.learning_rate,
            factors={
                "gains": settings.gain_lr,
                "shaping": settings.shaping_lr,
                "embeddings": settings.embedding_lr,
                "head": settings.head_lr,
            },
            share=self.model.config.shaping().share,
            clip=settings.clip,
        )
        self.stepper = steppers.get(self.model, self.objective.loss, self.config, self.batches.sizes, log)
        self._world, self._told = world, self.began
        self._pace = 6.0 * self.model.num_parameters() * settings.batch * self.data.length / world / FLOPS[self.config.device.type]
        self._saved: int | None = None  # step of the last checkpoint that this command wrote
        self._before = 0.0  # seconds that earlier commands spent, up to the checkpoint
        self._losses: list[float] = []  # of the last steps, at most `log_every`
        self._watched_losses: list[float] = []  # since the last look
        self.step, written = self._resume()
        if unused := settings.find_unused():
            log(f"this model has no use for {', '.join(unused)}")
        if rank == 0:  # only now: a run that cannot begin leaves no settings
            write_settings(settings)
        self.metrics = Metrics(self.out, self.step, settings.tensorboard, log, written) if rank == 0 else None
        self.stop = StopRequest(settings.minutes, self.began)
        self._watch = diagnostics.RunWatch(read_metrics(self.metrics.path)) if self.metrics and settings.watch_every else None

    def finish(self) -> Result:
        """Trains to the last step, and writes the model and the result."""
        settings, stop = self.settings, self.stop
        try:
            with show_progress(self.progress, settings.steps, self.step) as show, catch_interrupts(stop):
                while self.step < settings.steps:
                    self._advance(show)
                    if is_any(stop.is_due, self.config.device) and self.step < settings.steps:
                        self.save()
                        raise self._explain_stop()
            self._complete_metrics()
        finally:
            if self.metrics is not None:
                self.metrics.close()
        return self._export()

    def _explain_stop(self) -> Stopped:
        """The same class in every process: a study goes on after an alarm, and not after an interruption."""
        interrupted, alarmed = (is_any(flag, self.config.device) for flag in (self.stop.interrupted, bool(self.stop.alarm)))
        if alarmed and not self.stop.alarm:
            self.stop.alarm = "of the first process"
        after = "goes on from there" if self.settings.keep else "begins anew, since no checkpoints are kept"
        kind = Alarmed if alarmed and not interrupted else Stopped
        return kind(f"{self.stop.why} at step {self.step} of {self.settings.steps}; the same command {after}")

    def _advance(self, show: Callable[..., None]) -> None:
        """To the next step at which something is due, or to the end of a chunk."""
        settings, began = self.settings, time.monotonic()
        intervals = (settings.evaluate_every, settings.observe_every, settings.checkpoint_every, settings.watch_every or settings.steps)
        count = min(self._count_at_once(), settings.steps - self.step, *(every - self.step % every for every in intervals))
        batches = self.batches.chunk(self.step, count)
        losses = self.stepper.run(batches, self.schedule)
        if self.stepper.step != self.step + count:
            self._report_divergence(batches, losses)
        self._pace = (time.monotonic() - began) / count
        tokens = settings.batch * self.data.length / self._pace
        for loss in losses:
            self.step += 1
            self._losses = [*self._losses, loss][-settings.log_every :]
            if self.step % settings.log_every == 0 or self.step == settings.steps:
                self._write_losses(tokens_per_second=tokens)
        self.stepper.set_share(self.schedule.share(self.step))  # whatever looks at the model now sees it as the next step would
        show(self.step, losses[-1], tokens)
        last = self.step == settings.steps
        if self.step % settings.observe_every == 0 or last:
            self._write_layers()
        if settings.watch_every:
            self._watched_losses += losses
            if self.step % settings.watch_every == 0:
                self._look_for_alarms()
        if self.step % settings.evaluate_every == 0 or last:
            loss = self._write_test(None if last else settings.test_rows)
            if not self.progress:
                self.log(f"step {self.step}: train loss {losses[-1]:.4f}, test loss {loss:.4f}, {tokens:,.0f} tokens/s")
                self._told = time.monotonic()
        if self.step % settings.checkpoint_every == 0 or last:
            self.save()
        if not self.progress and time.monotonic() - self._told > SILENCE:
            self._told, left = time.monotonic(), self._pace * (settings.steps - self.step)
            self.log(f"step {self.step} of {settings.steps}: train loss {losses[-1]:.4f}, {describe_time(left)} left")

    def _count_at_once(self) -> int:
        """Steps until the next look at the clock and the keyboard. Several processes must take equally many."""
        return self.config.chunk if self._world > 1 else max(1, min(self.config.chunk, int(PATIENCE / self._pace)))

    def evaluate(self, rows: int | None = None) -> float:
        """The mean loss of a label of the test text, or of its first rows, in the same batches for every run. An incomplete last batch is
        left out."""
        count = self.test.steps_an_epoch
        if rows is not None:
            count = max(1, min(count, rows // self.settings.batch))
        total, weights = (torch.zeros((), device=self.config.device) for _ in range(2))
        for first in range(0, count, self.config.chunk):
            chunk = self.test.chunk(first, min(self.config.chunk, count - first))
            for batch in zip(*chunk, strict=True):
                # Without gradients, unless the loss is compiled: it would be compiled again.
                with self.stepper.forward_context(), torch.set_grad_enabled(self.config.compile != "off"):
                    weight = self.objective.weigh(batch)
                    total += weight * self.stepper.loss(*batch).detach()
                    weights += weight
        average(total)
        return float(total) / float(weights)

    def _write(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(self.step, kind, **values)

    def _write_losses(self, **speed: float) -> None:
        """The mean loss over the steps since the last such line was due."""
        every = self.settings.log_every
        window = self._losses[-(self.step % every or every) :]
        rate = self.settings.learning_rate(self.step - 1)
        self._write("train", loss=sum(window) / len(window), lr=rate, count=len(window), **speed)

    def _write_layers(self) -> None:
        if self.metrics is None:
            return
        ids, inputs = self._observed_batch(OBSERVED_ROWS)
        with self.stepper.attention_backend():
            self._write("layers", **diagnostics.observe(self.model, ids, self.stepper.gradients(), **inputs))

    def _look_for_alarms(self) -> None:
        """Writes what is watched, and the alarms. Only the first process does; all stop if it asks for that."""
        losses, self._watched_losses = self._watched_losses, []
        if self._watch is None:
            return
        ids, inputs = self._observed_batch(WATCHED_ROWS)
        with self.stepper.attention_backend():
            loss, batch = sum(losses) / len(losses), {"input_ids": ids, **inputs}
            values, alarms = self._watch.look(self.step, loss, self.model, batch, self.stepper.gradients())
        self._write("watch", **values)
        for alarm in alarms:
            self.log(str(alarm))
            self._write("alarm", **diagnostics.describe_alarm(alarm))
        if alarms and self.settings.watch_stop:
            self.stop.alarm = str(alarms[0])

    def _observed_batch(self, most: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Ids of the first rows of the test text, the same at every look, and the model's other inputs."""
        rows = max(1, min(most, OBSERVED_TOKENS // self.data.length))
        batch = tuple(tensor[0] if tensor.ndim == 1 else tensor[0, :rows] for tensor in self.test.chunk(0, 1))
        return batch[0], self.objective.inputs(batch)

    def _write_test(self, rows: int | None) -> float:
        loss = self.evaluate(rows)
        if not math.isfinite(loss):
            raise Diverged(f"the test loss after step {self.step} is not finite, {self._name_last_checkpoint()}")
        self._write("test", **self.objective.metrics(loss, self.data, self.settings))
        return loss

    def _complete_metrics(self) -> None:
        """Writes the last step's losses again if the metrics lack them: a power cut may lose lines of a step whose checkpoint is kept."""
        there = {line["kind"] for line in read_metrics(self.out / "metrics.jsonl") if line["step"] == self.step}
        if "train" not in there and self._losses:
            self._write_losses()
        if is_any("test" not in there, self.config.device):
            self._write_test(None)
            wait_for_all()

    def _resume(self) -> tuple[int, int]:
        """Loads the newest checkpoint. Returns its step and how many lines the metrics had by then; zeros without a checkpoint."""
        found = checkpoint.read_latest(self.out / "checkpoints", self.log, layout=dict, data=dict, losses=list, settings=str)
        if found is None:
            return 0, 0
        state, about = found
        refuse_other_settings(Settings.of(tomllib.loads(about["settings"])), self.settings)  # settings.toml may be lost or damaged
        refuse_other_data(about["data"], self.hashes, self.settings)  # before the model, whose shapes follow the vocabulary and the length
        if about["layout"] != self.stepper.layout() or not self.stepper.fits(state):
            raise ValueError(f"checkpoints must be of this model, got other names or shapes in {self.out}")
        if about["step"] > self.settings.steps or not all(isinstance(loss, int | float) for loss in about["losses"]):
            raise ValueError(f"checkpoints must be of a run of {self.settings.steps} steps, with its losses, got other ones in {self.out}")
        self.stepper.load(state, about["step"])
        self._losses = about["losses"]
        spent, written = about.get("seconds"), about.get("metrics")  # older checkpoints have neither
        self._before = spent if isinstance(spent, float) else 0.0
        watched = about.get("watched") if self.settings.watch_every else None
        self._watched_losses = [loss for loss in watched if isinstance(loss, int | float)] if isinstance(watched, list) else []
        self.log(f"going on from step {about['step']} of {self.settings.steps}")
        return about["step"], written if isinstance(written, int) else 0

    def save(self) -> None:
        """Writes a checkpoint, if any are kept and this step has none."""
        if self.rank == 0 and self.settings.keep and self.step != self._saved:
            about = {"layout": self.stepper.layout(), "settings": write_toml(self.settings), "data": self.hashes, "losses": self._losses}
            about |= {"seconds": self._count_seconds(), "metrics": 0 if self.metrics is None else self.metrics.count}
            about |= {"watched": self._watched_losses} if self._watched_losses else {}
            checkpoint.save(self.out / "checkpoints", self.step, self.stepper.state(), about, self.settings.keep)
            self._saved = self.step
        wait_for_all()

    def _count_seconds(self) -> float:
        """Over all commands that worked on the run."""
        return round(self._before + time.monotonic() - self.began, 1)

    def _report_divergence(self, batches: tuple[torch.Tensor, ...], losses: list[float]) -> None:
        """Raises `Diverged` with the place where it began. The state is still that before the step, so the step can be computed again."""
        step = self.stepper.step
        batch = tuple(tensor[step - self.step] for tensor in batches)

        def compute_again() -> torch.Tensor:
            with self.stepper.forward_context():
                return self.stepper.eager_loss(*batch)

        if math.isfinite(losses[step - self.step]):
            broken, place = "a gradient", diagnostics.last_non_finite(self.model, self.stepper.gradients_of(batch))
        else:
            broken, place = "the loss", diagnostics.first_non_finite(self.stepper.twin, compute_again)
        raise Diverged(f"{broken} of step {step} is not finite: it began in {place}; {self._name_last_checkpoint()}")

    def _name_last_checkpoint(self) -> str:
        kept = checkpoint.list_checkpoints(self.out / "checkpoints")
        return f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"

    def _export(self) -> Result:
        """Writes the model, then result.json: a folder that has it is finished."""
        device = torch.cuda.get_device_name() if self.config.device.type == "cuda" else "cpu"
        lines = read_metrics(self.out / "metrics.jsonl")
        result = make_result(self.settings, lines, data=self.hashes, device=device, seconds=self._count_seconds())
        if self.rank == 0:
            written = [*HISTORY, *(write_model(self.model, self.data, self.out) if self.settings.save_model else ())]
            (self.out / "diverged.json").unlink(missing_ok=True)  # of an earlier try
            write_result(result, self.out, written)
        wait_for_all()
        return result
