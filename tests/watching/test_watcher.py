"""`shaped.watch` in plain loops: the numbers of the step itself, at the chosen steps, and nothing changed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional as F

import shaped
from refusals import refused
from shaped.diagnosis.curves import CURVES, list_curves
from shaped.diagnosis.observation import observe
from shaped.watching.alarms import Alarm, Alarms


class Model(nn.Module):
    """Two layers of PyTorch's own; dropout shows that the step itself is seen."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True, norm_first=True) for _ in range(2))
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


IDS = torch.randint(20, (3, 9), generator=torch.Generator().manual_seed(0))


def make_model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def compute_loss(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def train(model: nn.Module, steps: int, validate: bool = True, **options: Any) -> shaped.Watcher:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shaped.watch(model, **options) as watcher:
        for _ in range(steps):
            loss = compute_loss(model)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            watcher.step(loss)
            if validate:
                with torch.no_grad():
                    compute_loss(model, IDS.flip(0))
            if watcher.stopped:
                break
    return watcher


def test_rows_are_what_a_diagnosis_measures():
    diagnosis = observe(make_model(), IDS, lambda output, ids: F.cross_entropy(output.flatten(0, 1), ids.flatten()))
    model = make_model()
    watcher = train(model, 5, every=2, sequences=3)
    assert [row.step for row in watcher.rows] == [0, 2, 4]
    (stack,) = diagnosis.stacks
    for name, values in list_curves(stack).items():
        assert list(watcher.rows[0].quantities[name].values()) == pytest.approx(values[-2:], rel=1e-6), name
    assert tuple(watcher.rows[0].quantities) == CURVES
    assert watcher.rows[0].loss == pytest.approx(diagnosis.loss)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_validation_is_not_taken_for_the_next_step():
    one, other = (train(make_model(), 2, validate, every=1, sequences=1) for validate in (True, False))
    assert one.rows == other.rows


def test_the_loss_is_the_mean_since_the_row_before():
    watcher, losses = shaped.watch(model := make_model(), every=3), []
    with watcher:
        for number in range(4):
            loss = compute_loss(model)
            loss.backward()
            watcher.step(losses.append(float(number)) or losses[-1])
    assert [row.loss for row in watcher.rows] == [0.0, 2.0]


def test_some_sequences_are_those_of_a_smaller_batch():
    one, few = make_model(), make_model()
    with shaped.watch(one, sequences=2) as watcher, shaped.watch(few, sequences=2) as other:
        compute_loss(one).backward()
        watcher.step(0.0)
        compute_loss(few, IDS[:2]).backward()
        other.step(0.0)
    for name in set(CURVES) - {"gradient"}:
        assert watcher.rows[0].quantities[name] == pytest.approx(other.rows[0].quantities[name], rel=1e-6), name


def test_watching_changes_no_bit():
    watched, plain = make_model(dropout=0.3), make_model(dropout=0.3)
    torch.manual_seed(1)
    train(watched, 3, every=1)
    torch.manual_seed(1)
    train(plain, 3, every=100)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in watched.state_dict().items())


def test_accumulated_batches_are_one_step():
    model = make_model()
    with shaped.watch(model, sequences=3) as watcher:
        for _ in range(2):
            compute_loss(model).backward()
        watcher.step(None)
    single = train(make_model(), 1, sequences=3)
    gradients, once = (seen.rows[0].quantities["gradient"] for seen in (watcher, single))
    assert list(gradients.values()) == pytest.approx([2 * value for value in once.values()], rel=1e-5)
    assert watcher.rows[0].loss is None


def test_files_of_a_run_that_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Alarms, "check", lambda self, row: [Alarm("rising loss", row.step, "", 5.0, 4.0)] if row.step == 1 else [])
    train(make_model(), 4, every=1, out=tmp_path)
    with (tmp_path / "watch.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a killed run
    watcher = train(make_model(), 3, every=1, out=tmp_path, start=3)
    lines = [json.loads(line) for line in (tmp_path / "watch.jsonl").read_text().splitlines()]
    assert [(line["step"], line.get("kind")) for line in lines] == [
        (0, None),
        (1, None),
        (1, "rising loss"),
        *((n, None) for n in range(2, 6)),
    ]
    assert (lines[2]["value"], lines[2]["threshold"], lines[2]["advice"][:7]) == (5.0, 4.0, "go back")
    assert [row.step for row in watcher.rows] == list(range(6))
    assert watcher.rows[0].quantities["entropy"] == lines[0]["entropy"]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("entropy_share/layers.1")] == list(range(6))
    assert [event.step for event in events.Scalars("loss")] == list(range(6))


def test_a_stop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Alarms, "check", lambda self, row: [Alarm("rising loss", row.step, "", 5.0, 4.0)] if row.step == 1 else [])
    stopped, going_on = train(make_model(), 5, every=1, stop=True), train(make_model(), 5, every=1)
    assert (len(stopped.rows), stopped.stopped, len(stopped.alarms)) == (2, True, 1)
    assert (len(going_on.rows), going_on.stopped, len(going_on.alarms)) == (5, False, 1)


def test_an_error_in_the_pass_leaves_nothing_behind():
    model: Any = make_model()
    model.layers[1].linear2.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), shaped.watch(model):
        compute_loss(model)
    assert not torch.overrides._get_current_function_mode_stack()
    assert not model.layers[0]._forward_hooks


def test_what_is_refused(tmp_path: Path):
    model: Any = make_model()
    (tmp_path / "file").write_text("")
    refusals: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
        (("every", "0"), {"every": 0}),
        (("sequences", "2.5"), {"sequences": 2.5}),
        (("start", "-1"), {"start": -1}),
        (("stop", "'yes'"), {"stop": "yes"}),
        (("tensorboard", "1"), {"tensorboard": 1}),
        (("out", "file"), {"out": tmp_path / "file"}),
    )
    for words, options in refusals:
        with refused(*words):
            shaped.watch(model, **options)
    with refused("model", "int"):
        shaped.watch(3)  # pyright: ignore[reportArgumentType]
    with refused("model", "called", "Model"), shaped.watch(model) as watcher:
        model.layers[0](torch.zeros(2, 3, 16)).sum().backward()
        watcher.step(1.0)
    with refused("loss", "[3]"), shaped.watch(model) as watcher:
        compute_loss(model).backward()
        watcher.step(torch.zeros(3))
    linear = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with refused("attention", "Sequential"), shaped.watch(linear) as watcher:
        linear(torch.zeros(2, 3)).sum().backward()
        watcher.step(1.0)
