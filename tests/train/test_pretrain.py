"""Training: every kind of model learns, Recover ends at the vanilla network, and interruptions of all kinds lose nothing."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

import shaped.hf
from refusals import refused
from shaped.train import checkpoint, data, metrics
from shaped.train.lock import Busy, alone
from shaped.train.pretrain import Diverged, Run, Stopped, pretrain, why_diverged
from shaped.train.results import Result, command_line
from shaped.train.settings import Settings
from train.conftest import KNOWN, UNIFORM, status

# How much each falls below log 40 in 300 steps, at least. Fixed shaping keeps attention small, so it is the slowest to use the document.
FALLS = [
    ("shaped", "fixed", 0.5),
    ("shaped", "learn", 1.0),
    ("shaped", "recover", 1.0),
    ("preln", "fixed", 1.0),
    ("postln", "fixed", 0.5),
    ("vanilla", "fixed", 1.0),
]


def quiet(settings: Settings, **how) -> Result:
    return pretrain(settings, say=lambda line: None, **how)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def curve(folder: Path) -> list[dict]:
    """What was measured, without what depends on the machine."""
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in metrics.read(folder / "metrics.jsonl")]


def command(settings: Settings) -> list[str]:
    config = settings.out.parent / "settings-of-the-command.toml"
    config.write_text(settings.to_toml())
    return ["-m", "shaped", "pretrain", "--config", str(config)]


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(shaped.__file__).parent.parent)}


@pytest.mark.parametrize(("model", "schedule", "fall"), FALLS)
def test_a_tiny_model_learns(tiny: Settings, model: str, schedule: str, fall: float):
    """To know the words alone is a loss of log 40 = 3.69; to see that a document has four of them, log 4 = 1.39."""
    result = quiet(replace(tiny, model=model, schedule=schedule, steps=300))
    first = metrics.read(tiny.out / "metrics.jsonl", "train")[0]["loss"]
    assert first > UNIFORM
    assert KNOWN < result.test_loss < UNIFORM - fall
    assert result.train_loss < first


def test_recover_ends_at_the_vanilla_network(tiny: Settings):
    """Also where the run ends with the very step at which the shaping is to be gone."""
    quiet(replace(tiny, steps=40, recover_steps=40))
    model = AutoModelForMaskedLM.from_pretrained(tiny.out)
    ids = torch.randint(5, 40, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        shaped_logits, plain = model(ids).logits, shaped.hf.vanilla(model)
        assert plain.config.block == "vanilla"
        assert all(layer.block.attention.shaping is None for layer in plain.model.layers)
        assert torch.equal(plain(ids).logits, shaped_logits)


def test_a_finished_run_loads_with_the_auto_classes(tiny: Settings):
    said: list[str] = []
    run = Run(replace(tiny, steps=40), 0, 1, said.append, False, {})
    result = run.finish()
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(tiny.out), AutoTokenizer.from_pretrained(tiny.out)
    for name, value in run.stepper.values().items():
        assert torch.equal(model.state_dict()[name], value)
    assert tokenizer.convert_tokens_to_ids("[MASK]") == tokenizer.mask_token_id == 4
    rows = torch.from_numpy(run.data.rows("valid")[:2].astype("int64"))
    assert model(rows).logits.shape == (2, 32, run.data.vocab)
    assert Result.read(tiny.out / "result.json") == result
    assert pretrain(replace(tiny, steps=40)) == result  # nothing is done again
    assert sorted(path.name for path in tiny.out.iterdir() if path.name.startswith(".")) == []


def test_killed_and_resumed_is_bit_exact(tiny: Settings, tmp_path: Path):
    """SIGKILL after a checkpoint was written, at a moment of no one's choosing; then the same command."""
    killed = replace(tiny, out=tmp_path / "killed")
    quiet(tiny)
    process = subprocess.Popen([sys.executable, *command(killed)], env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    patience = time.monotonic() + 60
    while not (killed.out / "checkpoints" / "step-00000040").exists() and time.monotonic() < patience:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed.out / "result.json").exists(), "it was too late to kill it"
    done = subprocess.run([sys.executable, *command(killed)], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert "going on from step" in done.stderr
    assert curve(killed.out) == curve(tiny.out)
    one, other = weights(tiny.out), weights(killed.out)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_resuming_from_every_checkpoint_is_bit_exact(tiny: Settings, tmp_path: Path):
    """Learn, whose gains Adam moves too, stopped by the clock and by the keyboard."""
    settings = replace(tiny, schedule="learn", clip=0.5, decay="linear")
    quiet(settings)
    other = replace(settings, out=tmp_path / "other")
    with pytest.raises(Stopped, match="step 16 of 120"):
        quiet(replace(other, minutes=0.0))
    run = Run(other, 0, 1, lambda line: None, False, {})
    assert run.step == 16
    advance = run._advance

    def interrupted(show) -> None:
        if run.step >= 56:
            os.kill(os.getpid(), signal.SIGINT)
        advance(show)

    run._advance = interrupted
    with pytest.raises(Stopped, match="interrupted at step 60 of 120; the same command goes on"):
        run.finish()
    result = quiet(other)
    assert curve(other.out) == curve(settings.out)
    assert all(torch.equal(weights(other.out)[name], value) for name, value in weights(settings.out).items())
    assert result.test_loss == Result.read(settings.out / "result.json").test_loss


def test_two_processes_have_the_loss_curve_of_one(tiny: Settings, tmp_path: Path):
    """The same global batch, half of it in each of two gloo processes. To rounding: sums come in another order."""
    tiny = replace(tiny, steps=36, clip=1.0, log_every=2, evaluate_every=18)
    quiet(tiny)
    both = replace(tiny, out=tmp_path / "both")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable]
    subprocess.run([*torchrun, *command(both)], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    one, two = ([line["loss"] for line in metrics.read(folder / "metrics.jsonl") if "loss" in line] for folder in (tiny.out, both.out))
    assert len(one) == 18 + 2
    assert two == pytest.approx(one, rel=1e-5)
    assert max(one) - min(one) > 0.2  # the curve is not flat


@pytest.mark.parametrize("damage", ["truncated", "flipped", "description"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tiny: Settings, tmp_path: Path, damage: str):
    quiet(tiny)
    (tiny.out / "result.json").unlink()
    newest = checkpoint.found(tiny.out / "checkpoints")[-1]
    broken = newest / ("state.json" if damage == "description" else "state.safetensors")
    content = bytearray(broken.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    broken.write_bytes(content[: len(content) // 2] if damage != "flipped" else content)
    expected, said = weights(tiny.out), []
    pretrain(tiny, say=said.append)
    assert "step-00000120 is truncated or damaged" in said[0]
    assert "the one before it is used" in said[0]
    assert said[1] == "going on from step 80 of 120"
    assert all(torch.equal(weights(tiny.out)[name], value) for name, value in expected.items())


def test_if_all_checkpoints_are_damaged_nothing_begins_anew_by_itself(tiny: Settings):
    quiet(replace(tiny, steps=40))
    (tiny.out / "result.json").unlink()
    for path in checkpoint.found(tiny.out / "checkpoints"):
        (path / "state.safetensors").write_bytes(b"")
    with refused("checkpoints", "delete it to begin anew"):
        quiet(replace(tiny, steps=40))


def test_a_checkpoint_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state = {"values": torch.arange(5.0)}
    checkpoint.save(tmp_path, 1, state, {}, keep=2)
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(tmp_path, 2, state, {}, keep=2)
    monkeypatch.undo()
    assert [path.name for path in checkpoint.found(tmp_path)] == ["step-00000001"]
    for step in (2, 3):
        checkpoint.save(tmp_path, step, state, {}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    found = checkpoint.latest(tmp_path, print)
    assert found is not None
    assert torch.equal(found[0]["values"], state["values"])


@pytest.mark.parametrize("half", [False, True])
def test_a_loss_that_is_not_finite_names_step_layer_and_checkpoint(tiny: Settings, half: bool):
    run = Run(replace(tiny, precision="bf16" if half else "float32"), 0, 1, lambda line: None, False, {})
    while run.step < 40:
        run._advance(lambda *shown: None)
    # Finite weights, with which the output of one layer overflows.
    with torch.no_grad():
        for model in (run.model, run.stepper.twin):
            model.get_parameter("model.layers.1.block.attention.output.weight").fill_(3e38)
    before = {name: value.clone() for name, value in run.stepper.values().items()}
    with pytest.raises(Diverged) as error:
        run._advance(lambda *shown: None)
    assert "the loss of step 40 is not finite" in str(error.value)
    assert "it began in the output of model.layers.1.block.attention.output;" in str(error.value)
    assert str(error.value).endswith("step-00000040")
    assert "\n" not in str(error.value)
    after = run.stepper.values()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_gradient_that_is_not_finite_is_told_from_a_loss(tiny: Settings):
    """Keys of 1e30 leave a softmax of zeros and ones, and a finite loss, but the norm of the queries' gradient overflows."""
    run = Run(tiny, 0, 1, lambda line: None, False, {})
    with torch.no_grad():
        run.model.get_parameter("model.layers.1.block.attention.key.weight").normal_(std=1e30, generator=torch.Generator().manual_seed(0))
    with pytest.raises(Diverged, match=r"^a gradient of step 0 is not finite: it began in that of model\.layers\.1\.block\.attention"):
        run._advance(lambda *shown: None)
    assert run.stepper.step == 0


def test_parameters_that_are_not_finite_are_named(tiny: Settings):
    run = Run(tiny, 0, 1, lambda line: None, False, {})
    with torch.no_grad():
        run.model.get_parameter("model.layers.0.block.gamma_attention").fill_(float("nan"))
    with pytest.raises(Diverged, match=r"step 0 is not finite: .*parameters model.layers.0.block.gamma_attention .*no checkpoint yet"):
        run._advance(lambda *shown: None)


def test_a_run_is_not_continued_with_other_settings(tiny: Settings):
    quiet(replace(tiny, steps=20))
    (tiny.out / "result.json").unlink()
    with refused("lr", "0.01", "0.001"):
        quiet(replace(tiny, steps=20, lr=1e-3))
    quiet(replace(tiny, steps=20, log_every=5, keep=1))  # how it is watched may change


def test_wrong_settings_of_a_run_are_refused(tiny: Settings, tmp_path: Path):
    with refused("data", "data.json"):
        quiet(replace(tiny, data=tmp_path))
    with refused("batch", "100"):
        quiet(replace(tiny, batch=100))
    assert not tiny.out.exists()
    with refused("graph", "cpu"):
        quiet(replace(tiny, graph="on"))


def test_everything_that_is_to_be_tried_is_a_setting(tiny: Settings):
    run = Run(
        replace(tiny, gamma=0.2, gamma_feedforward=0.1, embedding_std=0.5, head_std=0.01, gain_lr=0.0, tied=False, embedding_norm=True),
        0, 1, lambda line: None, False, {},
    )  # fmt: skip
    block: Any = run.model.model.layers[0].block
    assert block.gamma_attention.item() == pytest.approx(0.2)
    assert block.gamma_feedforward.item() == pytest.approx(0.1)
    assert block.lam_feedforward.item() == pytest.approx(0.99**0.5)
    head: Any = run.model.head
    assert head.weight.std().item() == pytest.approx(0.01, rel=0.1)
    tokens: Any = run.model.model.embedding.tokens
    assert tokens.weight.std().item() == pytest.approx(0.5, rel=0.1)
    matrix = block.feedforward.pre.weight.clone()
    run._advance(lambda *shown: None)
    assert block.gamma_attention.item() == pytest.approx(0.2)  # its learning rate is 0
    assert not torch.equal(block.feedforward.pre.weight, matrix)


def test_a_tied_head_learns(tiny: Settings):
    result = quiet(replace(tiny, tied=True, steps=300))
    assert result.test_loss < UNIFORM - 0.5
    model = AutoModelForMaskedLM.from_pretrained(tiny.out)
    assert model.head.weight is model.model.embedding.tokens.weight


def test_how_a_run_is_watched_does_not_make_it_worth_another_try(tiny: Settings):
    breaks = replace(tiny, steps=1, lr=1e38, warmup=0)
    with pytest.raises(Diverged) as error:
        quiet(breaks)
    assert why_diverged(replace(breaks, log_every=7, minutes=3.0, keep=0)) == str(error.value)
    for other in (replace(breaks, lr=1.0), replace(breaks, attention="math")):
        assert why_diverged(other) == ""
    (tiny.out / "diverged.json").write_text("[]")
    with refused("diverged.json"):
        why_diverged(breaks)


def test_the_status_of_a_run_whose_time_is_over_is_its_own(
    tiny: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    config = command(tiny)[-1]
    assert status(monkeypatch, "pretrain", "--config", config, "--minutes", "0") == 75
    assert "the time is over at step 16 of 120; the same command goes on from there" in capsys.readouterr().out
    assert status(monkeypatch, "pretrain", "--config", config) == 0


def test_a_second_run_in_a_folder_is_refused(tiny: Settings, tmp_path: Path):
    """While the first one lives, by one line and without harm; and no longer, once that was killed."""
    long = replace(tiny, steps=100_000)
    first = subprocess.Popen([sys.executable, *command(long)], env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        patience = time.monotonic() + 60
        while not (long.out / "checkpoints").exists() and time.monotonic() < patience:
            time.sleep(0.01)
        second = subprocess.run([sys.executable, *command(long)], env=ENVIRONMENT, capture_output=True, text=True)
        assert second.returncode == 2
        assert second.stderr == f"shaped: out must be a folder in which no other process works, got {long.out}, where one does\n"
        assert first.poll() is None
        with pytest.raises(Busy):
            quiet(long)
    finally:
        first.kill()
        first.wait()
    assert (long.out / ".lock").exists()  # it had no time to remove it
    with pytest.raises(Stopped, match="the time is over"):
        quiet(replace(long, minutes=0.0))
    assert not (long.out / ".lock").exists()


def test_a_lock_that_was_removed_while_it_was_waited_for_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first one finishes, and removes the file, between the second's opening and locking it."""
    flock, calls = fcntl.flock, []

    def late(handle: int, how: int) -> None:
        if not calls:
            (tmp_path / ".lock").unlink()
        calls.append(handle)
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with alone(tmp_path):
        assert len(calls) == 2
        with pytest.raises(Busy), alone(tmp_path):
            pass
    with alone(tmp_path):
        pass


def damaged_descriptions(right: dict[str, Any]) -> list[Any]:
    wrong: list[Any] = [[], 3, None, {}]
    wrong += [right | {key: value} for key in ("step", "sha256", "layout", "data", "losses") for value in (None, True, "x", -1)]
    return wrong + [{other: right[other] for other in right if other != key} for key in ("step", "sha256", "layout", "data", "losses")]


def test_a_description_of_any_shape_is_passed_by(tiny: Settings):
    """The checkpoint is named, and the one before it used."""
    settings = replace(tiny, steps=32, checkpoint_every=8, keep=2)
    quiet(settings)
    (tiny.out / "result.json").unlink()
    about = checkpoint.found(tiny.out / "checkpoints")[-1] / "state.json"
    right = json.loads(about.read_text())
    for content in [*map(json.dumps, damaged_descriptions(right)), "[" * 100_000]:
        about.write_text(content)
        said: list[str] = []
        assert Run(settings, 0, 1, said.append, False, {}).step == 24
        assert "step-00000032 is truncated or damaged" in said[0]
        assert "\n" not in said[0]
    for wrong in ({"losses": ["x"]}, {"step": 1000}):
        about.write_text(json.dumps(right | wrong))
        with refused("checkpoints", "32 steps", str(tiny.out)):
            Run(settings, 0, 1, lambda line: None, False, {})


def test_metrics_of_any_shape_are_left_out(tiny: Settings):
    quiet(replace(tiny, steps=4))
    path = tiny.out / "metrics.jsonl"
    right = path.read_text()
    for line in ("3", "[]", "{}", '{"step": "x", "kind": "test"}', '{"step": 1, "kind": []}', "\0\0", "[" * 100_000):
        path.write_text(f"{right}{line}\n{right}")
        assert metrics.read(path, "test") == [json.loads(line) for line in right.splitlines() if '"test"' in line]
    path.write_bytes(b"\xff\n")
    (tiny.out / "result.json").unlink()
    with refused("metrics", str(tiny.out)):
        quiet(replace(tiny, steps=4))


def test_the_command_of_a_result_is_what_differs_from_the_defaults():
    settings = Settings(data=Path("somewhere/data"), out=Path("runs/one"), lr=1e-3, train_gains=False)
    assert command_line(settings) == "shaped pretrain --data data --out one --no-train-gains --lr 0.001"


@pytest.mark.parametrize(("one", "other"), [({"gamma": 0.5}, {"gamma": 0.1}), ({"tied": True}, {"tied": True, "embedding_std": 0.2})])
def test_runs_that_share_a_program_are_what_they_are_alone(tiny: Settings, one: dict[str, Any], other: dict[str, Any]):
    """Also in what is not trained: gains that are buffers, a tied head's scale."""
    fixed = replace(tiny, steps=10, train_gains=False, keep=0, save_model=False)
    shared: dict[Any, Any] = {}
    losses = [
        pretrain(replace(fixed, out=tiny.out / name, **settings), steppers=steppers, say=lambda _: None).test_loss
        for name, settings, steppers in (("a", one, shared), ("b", other, shared), ("c", other, None))
    ]
    assert losses[1] == losses[2] != losses[0]


def test_a_run_does_not_go_on_with_other_text(tiny: Settings, tmp_path: Path, text: Path):
    with pytest.raises(Stopped):
        pretrain(replace(tiny, minutes=0.0), say=lambda _: None)
    other = tmp_path / "other"
    data.prepare([str(text)], other, vocab=80, length=data.load(tiny.data).length, valid_share=0.2, progress=False)
    with refused("data", "other"):
        pretrain(replace(tiny, data=other), say=lambda _: None)


def test_a_last_step_that_breaks_the_weights_is_no_result(tiny: Settings):
    with pytest.raises(Diverged, match="not finite"):
        pretrain(replace(tiny, steps=1, lr=1e38, warmup=0, log_every=1), say=lambda _: None)
    assert not (tiny.out / "result.json").exists()
