"""watch: measures every so many steps of a training loop, and says when the run is about to die."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor, nn

from shaped.checks import check_bool, positive, whole_number
from shaped.watching.alarms import Alarm, Alarms
from shaped.watching.log import WatchLog
from shaped.watching.recording import StepRecorder
from shaped.watching.rows import Row

EVERY, SEQUENCES = 100, 2


class Watcher(AbstractContextManager["Watcher"]):
    """What `watch` returns: the rows and alarms of a run, and whether it should stop."""

    def __init__(self, model: nn.Module, every: int, log: WatchLog | None, stop: bool, sequences: int, start: int):
        self.model, self.every, self.start = model, every, start
        self.rows: list[Row] = [] if log is None else log.rows
        """What was seen, oldest first; those of an earlier command too, if it wrote to the same folder."""
        self.alarms: list[Alarm] = []
        self.stopped = False
        """Should the loop end? Never, unless `stop` was given."""
        self._log, self._stop, self._sequences = log, stop, sequences
        self._rules = Alarms(self.rows)
        self._step = start
        self._losses: list[Tensor] = []
        self._recorder: StepRecorder | None = None
        self._is_open = False

    def __enter__(self) -> Watcher:
        self._is_open = True
        self._prepare()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_open = False
        self._close_recorder()
        if self._log is not None:
            self._log.close()

    def step(self, loss: Tensor | float | None, *, scale: float | None = None) -> list[Alarm]:
        """Ends a step: once after its `loss.backward()`, before the next forward pass. Returns the alarms of this step.

        Losses are read at the measured steps, all at once: a GPU need not wait for them at others. None: the loss is not known.

        Args:
            scale: what a GradScaler multiplied the loss by, `scaler.get_scale()` before `scaler.update()`. Gradients are divided by it. A
                step that the scaler skips because a gradient overflows is no alarm.
        """
        if not self._is_open:
            raise ValueError("watch must be entered before step: with shaped.watch(model) as watcher, got a step outside of it")
        scale = None if scale is None else positive("scale", scale)
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(f"loss must be one number, got shape {list(loss.shape)}")
        if loss is not None:
            # A copy: the loop may change its tensor, and the next replay of a CUDA graph does.
            self._losses.append(loss.detach().clone().reshape(()) if isinstance(loss, Tensor) else torch.tensor(float(loss), device="cpu"))
        found = self._measure(self._recorder, scale) if self._recorder is not None else []
        self._step += 1
        self._prepare()
        return found

    def _measure(self, recorder: StepRecorder, scale: float | None) -> list[Alarm]:
        losses = [float(loss) for loss in self._losses]
        row = Row.of(self._step, sum(losses) / len(losses) if losses else None, recorder.measure(scale))
        self._losses.clear()
        found = self._rules.check(row)
        self.alarms += found
        self.stopped = self.stopped or (self._stop and bool(found))
        if self._log is not None:
            self._log.write(row, found)
        else:
            self.rows.append(row)
        return found

    def _prepare(self) -> None:
        """The hooks must be there before the next step's forward pass."""
        self._close_recorder()
        if self._step % self.every == 0:
            self._recorder = StepRecorder(self.model, self._sequences)

    def _close_recorder(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        self._recorder = None


def watch(
    model: nn.Module,
    *,
    every: int = EVERY,
    out: str | os.PathLike[str] | None = None,
    stop: bool = False,
    sequences: int = SEQUENCES,
    start: int = 0,
    tensorboard: bool = True,
) -> Watcher:
    """Watches a training loop: the quantities of `shaped.diagnose` every so many steps, and alarms before a run dies.

        with shaped.watch(model, every=100, out="watch") as watcher:
            for batch in batches:
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                for alarm in watcher.step(loss):
                    print(alarm)

    The numbers are those of the training step itself, dropout included: there is no extra pass.

    Args:
        model: any module whose attention is `scaled_dot_product_attention`, `shaped_attention` or a softmax of a product. It is the module
            that the loop calls.
        every: steps between two measurements.
        out: folder for watch.jsonl, one row or alarm a line, and for TensorBoard files where tensorboard is installed. A run that is
            resumed continues the file. None: nothing is written. Of several processes the first one writes.
        stop: set `watcher.stopped` at the first alarm, for `if watcher.stopped: break`. For runs of one process.
        sequences: how many sequences of the batch are measured.
        start: number of the first step, of a run that is resumed. Lines of the file from this step on are dropped.
        tensorboard: False for no TensorBoard files.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    every, sequences = whole_number("every", every), whole_number("sequences", sequences)
    start = whole_number("start", start, least=0)
    rank, world = find_process()
    if check_bool("stop", stop) and world > 1:
        raise ValueError(f"stop must be False where several processes train, which would not all stop, got {world} processes")
    tensorboard = check_bool("tensorboard", tensorboard)
    log = None if out is None or rank > 0 else WatchLog(Path(out), start, tensorboard)
    return Watcher(model, every, log, stop, sequences, start)


def find_process() -> tuple[int, int]:
    """The number of this process, and how many train together."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if together else (0, 1)
