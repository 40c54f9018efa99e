"""`watch` in transformers.Trainer: a stock model, resumed, and stopped by an alarm."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from refusals import refused
from shaped.watching.alarms import Alarm, Alarms
from shaped.watching.trainer import WatchCallback


class Text(torch.utils.data.Dataset):
    def __init__(self):
        self.ids = torch.randint(40, (64, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def make_trainer(folder: Path, callback: Any, steps: int = 6, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=12, bos_token_id=0, eos_token_id=0))
    given: dict[str, Any] = {
        "max_steps": steps,
        "save_steps": 4,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(str(folder), per_device_train_batch_size=4, seed=0, **given | options)
    return Trainer(model=model, args=arguments, train_dataset=Text(), eval_dataset=Text(), callbacks=[callback])


def read_steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "watch.jsonl").read_text().splitlines()]


def test_rows_of_a_stock_model_and_of_a_resumed_run(tmp_path: Path):
    callback = WatchCallback(every=2)
    trainer = make_trainer(tmp_path, callback, gradient_accumulation_steps=2, max_grad_norm=1e-3, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert callback.watcher is not None
    rows = callback.watcher.rows
    assert [row.step for row in rows] == read_steps(tmp_path) == [0, 2, 4]
    assert list(rows[0].quantities["entropy"]) == ["transformer.h.0", "transformer.h.1"]
    norms = {entry["step"]: entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry}
    for row in rows:
        in_layers = math.hypot(*row.quantities["gradient"].values())
        assert 0.1 < in_layers < norms[row.step + 1]  # before they are clipped to 0.001; embeddings are in no layer
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [row.loss for row in rows] == pytest.approx([losses[0], sum(losses[1:3]) / 2, sum(losses[3:5]) / 2], rel=1e-3)
    logged = [entry for entry in trainer.state.log_history if "entropy_share/transformer.h.1" in entry]
    assert [entry["step"] for entry in logged] == [0, 2, 4]
    again = WatchCallback(every=2)
    make_trainer(tmp_path, again, steps=8).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert read_steps(tmp_path) == [0, 2, 4, 6]


@pytest.mark.parametrize("average", [True, False])
def test_the_loss_of_one_process_of_two(average: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The Trainer counts the items of both: the first one's share is half of its mean loss."""
    trainer: Any = make_trainer(tmp_path, callback := WatchCallback(every=1), average_tokens_across_devices=average)
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 2))
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    ids = Text().ids[:4]
    counted = ids[:, 1:].numel() * (2 if average else 1)
    outputs = trainer.model.eval()(ids, labels=ids, num_items_in_batch=counted)
    outputs.loss.backward()
    callback.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control)
    callback.on_train_end(trainer.args, trainer.state, trainer.control)
    assert callback.watcher is not None
    assert callback.watcher.rows[0].loss == pytest.approx(float(trainer.model(ids, labels=ids).loss.detach()), rel=1e-5)


def test_an_alarm_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(Alarms, "check", lambda self, row: [Alarm("rising loss", row.step, "", 5.0, 4.0)] if row.step == 2 else [])
    for stop, steps in ((True, 3), (False, 6)):
        trainer = make_trainer(tmp_path / str(stop), WatchCallback(every=1, stop=stop))
        trainer.train()
        assert trainer.state.global_step == steps
    assert "step 2: rising loss: 5, threshold 4" in caplog.text


def test_what_is_refused(tmp_path: Path):
    callback: Any = WatchCallback
    for words, options in ((("every", "0"), {"every": 0}), (("stop", "1"), {"stop": 1}), (("sequences", "'a'"), {"sequences": "a"})):
        with refused(*words):
            callback(**options)


def test_an_error_in_the_pass_leaves_nothing_behind(tmp_path: Path):
    trainer: Any = make_trainer(tmp_path, callback := WatchCallback(every=1), steps=1)
    trainer.model.transformer.h[1].mlp.act.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not torch.overrides._get_current_function_mode_stack()  # an error in the pass leaves no function mode behind
    callback.on_train_end(trainer.args, trainer.state, trainer.control)
    assert not any(module._forward_pre_hooks for module in trainer.model.modules())
