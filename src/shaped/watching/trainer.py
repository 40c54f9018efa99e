"""`watch` for `transformers.Trainer`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from shaped.checks import check_bool, whole_number
from shaped.hf.callbacks import LayerLogCallback
from shaped.watching.alarms import Alarm
from shaped.watching.watcher import EVERY, SEQUENCES, Watcher, watch

logger = logging.getLogger(__name__)


class WatchCallback(LayerLogCallback):
    """`shaped.watch` in a Trainer: `Trainer(..., callbacks=[WatchCallback(every=100, stop=True)])`, for any model that `watch` takes.

    Rows and alarms go to watch.jsonl in the output directory, rows also to everything in `report_to`, alarms to the log as warnings.
    Gradients are those before the Trainer clips them. The loss is that of the model's output, as the Trainer scales it; it is not known if
    that has none. Of several processes it is the first one's.

    Args:
        stop: end the training at the first alarm, after that step. For runs of one process.
    """

    def __init__(self, every: int = EVERY, *, stop: bool = False, sequences: int = SEQUENCES):
        super().__init__()
        self.every, self.stop, self.sequences = whole_number("every", every), check_bool("stop", stop), whole_number("sequences", sequences)
        self.watcher: Watcher | None = None
        self._losses: list[Tensor] = []  # of the batches that are accumulated
        self._are_shares, self._processes = False, 1
        self._remove: Callable[[], None] = lambda: None

    @property
    def alarms(self) -> list[Alarm]:
        """Those of this training so far."""
        return [] if self.watcher is None else self.watcher.alarms

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A resumed run continues the file, and the alarms know what was before."""
        self._close()
        self.watcher = watch(
            kwargs["model"],
            every=self.every,
            out=args.output_dir or ".",
            stop=self.stop,
            sequences=self.sequences,
            start=state.global_step,
            tensorboard=False,  # `report_to` says where numbers go
        )
        self.watcher.__enter__()
        self._processes = args.world_size if args.average_tokens_across_devices else 1
        self._remove = kwargs["model"].register_forward_hook(self._keep_loss, with_kwargs=True).remove

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.watcher is not None
        count, losses = len(self.watcher.rows), self._losses
        loss = torch.stack(losses).sum() * (self._processes if self._are_shares else 1 / len(losses)) if losses else None
        scaler = getattr(kwargs.get("optimizer"), "scaler", None)  # accelerate's, in half precision
        alarms = self.watcher.step(loss, scale=None if scaler is None else scaler.get_scale())
        self._losses = []
        if len(self.watcher.rows) > count:
            self.log_row(self.watcher.rows[-1].to_json(), args, state, control, **kwargs)
        for alarm in alarms:
            logger.warning("%s", alarm)
        # The Trainer sets this to False at the beginning of every epoch, and reads it after each step.
        control.should_training_stop = control.should_training_stop or self.watcher.stopped

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close()

    def _keep_loss(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        # Where the Trainer counts the items of all accumulated batches and of all processes, the model divides by that number: the losses
        # are shares of one.
        self._are_shares = kwargs.get("num_items_in_batch") is not None
        loss = output.get("loss") if isinstance(output, dict) else None
        if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
            self._losses.append(loss.detach().reshape(()))

    def _close(self) -> None:
        self._remove()
        if self.watcher is not None:
            self.watcher.__exit__(None, None, None)
