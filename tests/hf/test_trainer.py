"""transformers.Trainer: twenty steps, resumed halfway, with the schedules and the diagnostics as callbacks."""

import json
import math
from typing import Any

import pytest
import torch
from stock import bart, bert, t5
from stock import made as stock_model
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from refusals import refused
from shaped.hf import (
    DiagnosticsCallback,
    ShapedConfig,
    ShapedForCausalLM,
    ShapedForMaskedLM,
    ShapedForQuestionAnswering,
    ShapedForSequenceClassification,
    ShapedForTokenClassification,
    ShapingCallback,
    parameter_groups,
    shape,
    vanilla,
)
from shaped.hf.observation import find_layers
from shaped.nn import Recover, gains
from shaped.nn.diagnostics import attention_entropy, token_correlation
from shaped.testing.stats import generator


class Text(Dataset):
    """Sequences in which every second token is to be told from the one before it."""

    def __init__(self, padded=False):
        ids = torch.randint(2, 20, (160, 12), generator=generator(7))
        ids[:, 1::2] = ids[:, ::2] + 18
        self.labels = torch.where(torch.arange(12) % 2 == 1, ids, -100)
        self.ids = torch.where(torch.arange(12) % 2 == 1, 1, ids)
        self.padded = padded

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        row = {"input_ids": self.ids[i], "labels": self.labels[i], "attention_mask": torch.ones(12, dtype=torch.long)}
        if self.padded:
            row["attention_mask"][8:] = 0
        return row


def model_of(schedule, seed=0) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 12,
    }
    return ShapedForMaskedLM(ShapedConfig(**sizes, gamma=0.3, schedule=schedule, recover_steps=15))


def trainer_of(model, folder, callbacks, steps=20, rate=3e-3, data=None, clip=1.0, batch=8, accumulate=1, report_to=()):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        learning_rate=rate,
        lr_scheduler_type="constant",
        save_steps=10,
        logging_steps=1,
        max_grad_norm=clip,
        report_to=list(report_to),
        use_cpu=True,
        seed=3,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    optimiser = torch.optim.AdamW(parameter_groups(model), lr=rate)
    return Trainer(model=model, args=arguments, train_dataset=data or Text(), callbacks=callbacks, optimizers=(optimiser, None))


@pytest.mark.parametrize("schedule", ["fixed", "learn", "recover"])
def test_twenty_steps_and_a_resumed_run_that_ends_at_the_same_weights(schedule, tmp_path):
    def run(resume):
        model = model_of(schedule)
        callbacks = [ShapingCallback(model.config.shaping()), DiagnosticsCallback(every=5)]
        trainer = trainer_of(model, tmp_path, callbacks)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10") if resume else None)
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        return model, losses, callbacks[1]

    model, losses, diagnostics = run(resume=False)
    assert sum(losses[-3:]) < sum(losses[:3])
    assert list(tmp_path.rglob("model.safetensors"))
    assert not [path for path in tmp_path.rglob("*") if path.name in ("pytorch_model.bin", "model.bin", "model.pt")]
    again, _, resumed = run(resume=True)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert [row["step"] for row in diagnostics.history] == [row["step"] for row in resumed.history] == [0, 5, 10, 15]
    assert diagnostics.history == resumed.history
    if schedule == "recover":
        assert torch.equal(vanilla(again)(Text().ids[:2]).logits, again(Text().ids[:2]).logits)
        shares = [row["gamma1"]["model.layers.0"] for row in diagnostics.history]
        assert shares == pytest.approx([1.0, 1 - 5 / 15, 1 - 10 / 15, 0.0])


def test_a_cut_off_log_is_continued(tmp_path):
    (tmp_path / "diagnostics.jsonl").write_text('{"step": 0, "entropy": {}}\n{"step": 5, "ent')
    callback = DiagnosticsCallback(every=5)
    trainer = trainer_of(model_of("fixed"), tmp_path, [callback], steps=6)
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "diagnostics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 5]


def test_diagnostics_are_logged_as_a_loss_is(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = DiagnosticsCallback(every=2)
    trainer = trainer_of(model_of("learn"), tmp_path, [callback], steps=3, report_to=["tensorboard"])
    trainer.train()
    events = EventAccumulator(str(next(tmp_path.rglob("events.out.tfevents.*")).parent)).Reload()
    names = ("entropy", "correlation", "gradient_norm", "gamma1", "gamma2")
    for name in names:
        for layer in ("model.layers.0", "model.layers.1"):
            logged = {event.step: event.value for event in events.Scalars(f"train/{name}/{layer}")}
            assert logged == pytest.approx({row["step"]: row[name][layer] for row in callback.history}, rel=1e-6)
    in_history = [row for row in trainer.state.log_history if "entropy/model.layers.0" in row]
    assert [row["step"] for row in in_history] == [0, 2]
    assert "train/loss" in events.Tags()["scalars"]
    assert "entropy" not in capsys.readouterr().out  # too much for a console


@pytest.mark.parametrize("padded", [False, True])
def test_diagnostics_are_what_they_say(padded, tmp_path):
    """Against the matrices, hidden states and gradients of one step, whose learning rate is 0."""
    model, data = model_of("fixed"), Text(padded)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.block.attention.query.weight.mul_(20)  # far from uniform
    callback = DiagnosticsCallback(every=1, sequences=8)
    seen = []

    trainer = trainer_of(model, tmp_path, [callback], steps=1, rate=0.0, data=data, clip=0.0)
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: seen.append(collate(rows)) or seen[-1]
    trainer.train()
    batch = seen[0]
    outputs = model.eval()(batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True, output_attentions=True)
    row, real = callback.history[0], batch["attention_mask"].bool()
    keep = 8 if padded else 12
    mean = torch.eye(12)[None, None] - real[:, None, None] / real.sum(-1)[:, None, None, None]  # what is not softmax in A
    for layer in range(2):
        name = f"model.layers.{layer}"
        softmax = (outputs.attentions[layer] - mean)[:, :, :keep, :keep]
        entropy = -(softmax * softmax.clamp(min=1e-30).log()).sum(-1).mean().item()
        assert row["entropy"][name] == pytest.approx(entropy, rel=1e-3)
        assert entropy < 0.95 * math.log(keep)
        states = torch.nn.functional.normalize(outputs.hidden_states[layer + 1][:, :keep], dim=-1)
        rows, columns = torch.triu_indices(keep, keep, 1)
        assert row["correlation"][name] == pytest.approx((states @ states.mT)[:, rows, columns].mean().item(), rel=1e-4)
    model.train().zero_grad()
    model(**batch).loss.backward()
    squares = sum(parameter.grad.square().sum() for parameter in model.model.layers[1].parameters() if parameter.grad is not None)
    assert row["gradient_norm"]["model.layers.1"] == pytest.approx(math.sqrt(squares), rel=1e-3)
    assert row["gamma2"] == {"model.layers.0": 1.0, "model.layers.1": 1.0}


def test_a_stock_model_is_trained_shaped_and_recovers(tmp_path):
    stock = stock_model(bert, "sdpa").float().train()
    callback = DiagnosticsCallback(every=4)
    trainer = trainer_of(shape(stock, tau0=None), tmp_path, [ShapingCallback(Recover(5)), callback], steps=5)
    trainer.train()
    assert list(callback.history[0]["entropy"]) == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    plain = vanilla(stock)
    assert plain.config._attn_implementation == "sdpa"
    assert torch.equal(plain.eval()(Text().ids[:2]).logits, stock.eval()(Text().ids[:2]).logits)


def test_gains_do_not_decay():
    model = model_of("learn")
    groups = parameter_groups(model, 0.1)
    undecayed = {id(parameter) for parameter in groups[1]["params"]}
    assert groups[1]["weight_decay"] == 0.0
    assert {id(gain) for gain in gains(model).values()} <= undecayed


def test_names_of_layers():
    assert list(find_layers(stock_model(bert))) == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert list(find_layers(stock_model(t5))) == [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(2)]
    assert list(find_layers(model_of("fixed"))) == ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize("make", [bart, t5])
def test_diagnostics_of_encoder_and_decoder(make, tmp_path):
    class Pairs(Text):
        def __getitem__(self, i):
            return super().__getitem__(i) | {"labels": self.ids[i, :7]}

    callback = DiagnosticsCallback(every=1)
    model = stock_model(make).float().train()
    trainer_of(model, tmp_path, [callback], steps=1, data=Pairs(padded=True)).train()
    (row,) = callback.history
    assert list(row["entropy"]) == list(row["correlation"]) == list(row["gradient_norm"]) == list(find_layers(model))
    assert all(math.isfinite(value) for value in row["entropy"].values())
    assert all(entropy <= math.log(8) + 1e-6 for name, entropy in row["entropy"].items() if "encoder" in name.split("."))


@pytest.mark.parametrize("block", ["preln", "postln", "vanilla"])
def test_diagnostics_of_what_is_compared_with(block, tmp_path):
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    callback = DiagnosticsCallback(every=1)
    trainer_of(ShapedForMaskedLM(ShapedConfig(**sizes, block=block)), tmp_path, [callback], steps=1).train()
    assert callback.history[0]["gamma1"] == {"model.layers.0": 0.0, "model.layers.1": 0.0}
    assert len(callback.history[0]["entropy"]) == 2


def test_diagnostics_see_the_same_under_eager(tmp_path):
    rows = []
    for choice in ("shaped", "eager"):
        model, callback = model_of("fixed"), DiagnosticsCallback(every=1)
        model.set_attn_implementation(choice)
        trainer_of(model, tmp_path / choice, [callback], steps=1).train()
        rows.append(callback.history[0]["entropy"])
    assert rows[0] == pytest.approx(rows[1])
    assert len(rows[0]) == 2


def test_diagnostics_refuse_what_they_cannot_see_and_leave_nothing_behind(tmp_path):
    with refused("attn_implementation", "sdpa"):
        trainer_of(stock_model(bert, "sdpa").float(), tmp_path, [DiagnosticsCallback()], steps=1).train()
    model = model_of("fixed")
    trainer = trainer_of(model, tmp_path, [DiagnosticsCallback(every=1)], steps=1)
    fails = model.head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    fails.remove()
    trainer.train()
    assert not any(hasattr(module, "attention_hooks") for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "kind",
    [ShapedForMaskedLM, ShapedForCausalLM, ShapedForSequenceClassification, ShapedForTokenClassification, ShapedForQuestionAnswering],
)
def test_accumulated_gradients_are_those_of_the_whole_batch(kind, tmp_path):
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 40}

    class Labelled(Text):
        def __getitem__(self, i):
            row = super().__getitem__(i)
            if kind is ShapedForSequenceClassification:
                return row | {"labels": i % 2}
            labels = row.pop("labels").masked_fill(torch.arange(12) < i % 8, -100)  # some sequences have more than others
            return row | ({"start_positions": i % 8, "end_positions": 11} if kind is ShapedForQuestionAnswering else {"labels": labels})

    norms = []
    for batch, times in ((8, 1), (2, 4)):
        torch.manual_seed(0)
        work: dict[str, Any] = {"batch": batch, "accumulate": times, "data": Labelled(), "rate": 0.0, "clip": 1e9}
        trainer = trainer_of(kind(ShapedConfig(**sizes)), tmp_path, [], steps=1, **work)
        trainer.train()
        norms.append(next(row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row))
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_wrong_input_is_named():
    with refused("every", "0"):
        DiagnosticsCallback(every=0)
    with refused("schedule", "Recover"):
        ShapingCallback(Recover(3)).on_train_begin(None, type("State", (), {"global_step": 0}), None, model=model_of("learn"))  # pyright: ignore


Q, X = torch.zeros(1, 2, 6, 4), torch.zeros(2, 5, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: attention_entropy(None, Q), ["q", "tensor", "None"]),  # pyright: ignore
        (lambda: attention_entropy(Q[0, 0], Q), ["q", "heads", "(6, 4)"]),
        (lambda: attention_entropy(Q, Q[..., :3]), ["k", "features", "3"]),
        (lambda: attention_entropy(Q, Q.expand(3, 2, 6, 4)), ["k", "batch", "3"]),
        (lambda: attention_entropy(Q.expand(1, 2, 6, 4), Q.expand(1, 2, 6, 4).repeat(1, 2, 1, 1)), ["k", "heads", "4"]),
        (lambda: attention_entropy(Q, Q[..., :4, :]), ["q", "tokens", "6"]),
        (lambda: attention_entropy(Q, Q, scale=math.inf), ["scale", "finite", "inf"]),
        (lambda: attention_entropy(Q, Q, attn_mask=torch.ones(5, 5)), ["attn_mask", "(5, 5)"]),
        (lambda: attention_entropy(Q, Q, attn_mask=torch.ones(6, 6, dtype=torch.long)), ["attn_mask", "boolean", "int64"]),
        (lambda: attention_entropy(Q, Q, block=0), ["block", "0"]),
        (lambda: token_correlation([[1.0]]), ["x", "tensor"]),  # pyright: ignore
        (lambda: token_correlation(X[0, 0]), ["x", "[..., tokens, features]", "[3]"]),
        (lambda: token_correlation(X.long()), ["x", "floats", "int64"]),
        (lambda: token_correlation(X, torch.ones(2, 4)), ["real", "[2, 5]", "[2, 4]"]),
        (lambda: token_correlation(X, [1, 1]), ["real", "tensor", "[1, 1]"]),  # pyright: ignore
    ],
)
def test_diagnostics_name_what_is_wrong(call, words):
    with refused(*words):
        call()


def test_entropy_is_not_rounded_by_autocast():
    """Logits in the hundreds: a bfloat16 would round them by 1."""
    q, k = 10 * torch.randn(2, 1, 2, 40, 64, generator=generator(3))
    with torch.autocast("cpu", torch.bfloat16):
        found = attention_entropy(q, k)
    assert torch.equal(found, attention_entropy(q, k))


def test_entropy_and_correlation_have_their_limits():
    q, k = torch.zeros(1, 2, 6, 4), torch.randn(1, 1, 6, 4, generator=generator(1))
    assert torch.allclose(attention_entropy(q, k, block=4), torch.tensor(math.log(6.0)))
    causal = attention_entropy(q, k, is_causal=True, block=4)
    assert torch.allclose(causal[0, 0], torch.arange(1.0, 7.0).log(), atol=1e-6)
    few = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
    few[..., :2] = True
    few[..., 5, :] = False
    expected = torch.tensor([math.log(2.0)] * 5 + [0.0])
    assert torch.allclose(attention_entropy(q, k, attn_mask=few, block=4)[0, 0], expected)
    bias = torch.zeros(1, 1, 1, 6).masked_fill(torch.arange(6) > 2, -torch.inf)
    assert torch.allclose(attention_entropy(q, k, attn_mask=bias), torch.tensor(math.log(3.0)))
    x = torch.randn(1, 8, generator=generator(2)).expand(5, 8)
    assert token_correlation(x).item() == pytest.approx(1.0)
    assert token_correlation(torch.eye(5)).item() == pytest.approx(0.0, abs=1e-7)
    mixed = torch.cat([x, -x[:1]])
    assert token_correlation(mixed, torch.tensor([1, 1, 1, 1, 1, 0])).item() == pytest.approx(1.0)
    assert math.isnan(token_correlation(x[:1]).item())
