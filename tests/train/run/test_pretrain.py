"""Training: every kind of model learns, Recover ends at the vanilla network, and what breaks is named."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

import shaped.hf
from refusals import refused
from shaped.files import write_sealed
from shaped.testing.stats import Z
from shaped.train.run.folder import read_divergence
from shaped.train.run.loop import Run, pretrain
from shaped.train.run.metrics import read_metrics
from shaped.train.run.result import Result, write_command
from shaped.train.run.settings import Settings
from shaped.train.run.stopping import Diverged
from shaped.train.step.stepper_cache import StepperCache
from train.conftest import KNOWN, UNIFORM
from train.runs import ENVIRONMENT, command, quiet

ARMS: list[dict[str, Any]] = [
    {"schedule": "fixed"},
    {"schedule": "learn"},
    {"schedule": "recover"},
    {"schedule": "recover", "qk_norm": True, "tau0": None},
    {"schedule": "learn", "qk_norm": True, "qk_gain": True, "tau0": None},
    {"model": "preln"},
    {"model": "preln", "norm": "rms", "qk_norm": True, "qk_gain": True},
    {"model": "preln", "init": "gpt2"},
    {"model": "postln"},
    {"model": "vanilla", "qk_norm": True},
    {"model": "dyt"},
]


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_a_tiny_model_learns(tiny: Settings, arm: dict[str, Any]):
    """To know the words alone is a loss of log 40 = 3.69; to see that a document has four of them, log 4 = 1.39.

    In 120 steps fixed shaping, which keeps attention small, falls by 0.295 below log 40, the others by 0.38 to 0.86. Without attention
    it falls by 0.08: some words that are to be guessed are left in their places.
    """
    result = quiet(replace(tiny, steps=120, **arm))
    first = read_metrics(tiny.out / "metrics.jsonl", "train")[0]["loss"]
    assert first > UNIFORM
    assert KNOWN < result.test_loss < UNIFORM - 0.2
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


def test_a_finished_run_loads_with_the_auto_classes(tiny: Settings, tmp_path: Path):
    """Also where tools have left something beside the tokenizer, which does not come along."""
    shutil.copytree(tiny.data, tmp_path / "data")
    (tmp_path / "data" / "tokenizer" / ".ipynb_checkpoints").mkdir()
    tiny = replace(tiny, data=tmp_path / "data")
    said: list[str] = []
    run = Run(replace(tiny, steps=40), 0, 1, said.append, False, StepperCache())
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


def test_two_processes_have_the_loss_curve_of_one(tiny: Settings, tmp_path: Path):
    """The same global batch, half of it in each of two gloo processes. To rounding: sums come in another order."""
    tiny = replace(tiny, steps=36, clip=1.0, log_every=2, evaluate_every=18)
    quiet(tiny)
    both = replace(tiny, out=tmp_path / "both")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable]
    subprocess.run([*torchrun, *command(both)], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    one, two = ([line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line] for folder in (tiny.out, both.out))
    assert len(one) == 18 + 2
    assert two == pytest.approx(one, rel=1e-5)
    assert max(one) - min(one) > 0.2  # the curve is not flat


@pytest.mark.parametrize("half", [False, True])
def test_a_loss_that_is_not_finite_names_step_layer_and_checkpoint(tiny: Settings, half: bool):
    run = Run(replace(tiny, precision="bf16" if half else "float32"), 0, 1, lambda line: None, False, StepperCache())
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
    run = Run(tiny, 0, 1, lambda line: None, False, StepperCache())
    with torch.no_grad():
        run.model.get_parameter("model.layers.1.block.attention.key.weight").normal_(std=1e30, generator=torch.Generator().manual_seed(0))
    with pytest.raises(Diverged, match=r"^a gradient of step 0 is not finite: it began in that of model\.layers\.1\.block\.attention"):
        run._advance(lambda *shown: None)
    assert run.stepper.step == 0


def test_parameters_that_are_not_finite_are_named(tiny: Settings):
    run = Run(tiny, 0, 1, lambda line: None, False, StepperCache())
    with torch.no_grad():
        run.model.get_parameter("model.layers.0.block.gamma_attention").fill_(float("nan"))
    with pytest.raises(Diverged, match=r"step 0 is not finite: .*parameters model.layers.0.block.gamma_attention .*no checkpoint yet"):
        run._advance(lambda *shown: None)


def test_wrong_settings_of_a_run_are_refused(tiny: Settings, tmp_path: Path):
    with refused("data", "data.json"):
        quiet(replace(tiny, data=tmp_path))
    with refused("batch", "100"):
        quiet(replace(tiny, batch=100))
    assert not tiny.out.exists()
    with refused("out must be a folder", "test_pretrain.py"):
        quiet(replace(tiny, out=Path(__file__)))
    with refused("graph", "cpu"):
        quiet(replace(tiny, graph="on"))
    before = sorted(tiny.data.iterdir())
    with refused("out must be another folder than data", str(tiny.data)):
        quiet(replace(tiny, out=tiny.data))
    assert sorted(tiny.data.iterdir()) == before


def test_everything_that_is_to_be_tried_is_a_setting(tiny: Settings):
    stds = {"embedding_std": 0.5, "head_std": 0.01}
    settings = replace(tiny, width=128, gamma=0.2, gamma_feedforward=0.1, gain_lr=0.0, tied=False, embedding_norm=True, **stds)
    run = Run(settings, 0, 1, lambda line: None, False, StepperCache())
    block: Any = run.model.model.layers[0].block
    assert block.gamma_attention.item() == pytest.approx(0.2)
    assert block.gamma_feedforward.item() == pytest.approx(0.1)
    assert block.lam_feedforward.item() == pytest.approx(0.99**0.5)
    for part, std in ((run.model.head, 0.01), (run.model.model.embedding.tokens, 0.5)):
        weight: Any = part.weight
        assert weight.std().item() == pytest.approx(std, rel=Z / (2 * weight.numel()) ** 0.5)  # 5 standard errors: 4 %
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
    assert read_divergence(replace(breaks, log_every=7, minutes=3.0, keep=0)) == str(error.value)
    for other in (replace(breaks, lr=1.0), replace(breaks, attention="math")):
        assert read_divergence(other) == ""
    (tiny.out / "diverged.json").write_text("[]")
    with refused("diverged.json"):
        read_divergence(breaks)


def test_the_command_of_a_result_is_what_differs_from_the_defaults():
    settings = Settings(data=Path("somewhere/data"), out=Path("runs/one"), lr=1e-3, train_gains=False)
    assert write_command(settings) == "shaped pretrain --data data --out one --no-train-gains --lr 0.001"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"gamma": 0.5}, {"gamma": 0.1}),
        ({"tied": True}, {"tied": True, "embedding_std": 0.2}),
        ({"positions": "rope"}, {"positions": "rope", "rope_base": 10.0}),
    ],
)
def test_runs_that_share_a_program_are_what_they_are_alone(tiny: Settings, one: dict[str, Any], other: dict[str, Any]):
    """Also in what is not trained: gains that are buffers, a tied head's scale."""
    fixed = replace(tiny, steps=10, train_gains=False, keep=0, save_model=False)
    shared = StepperCache()
    losses = [
        pretrain(replace(fixed, out=tiny.out / name, **settings), steppers=steppers, log=lambda _: None).test_loss
        for name, settings, steppers in (("a", one, shared), ("b", other, shared), ("c", other, None))
    ]
    assert losses[1] == losses[2] != losses[0]


def test_a_last_step_that_breaks_the_weights_is_no_result(tiny: Settings):
    with pytest.raises(Diverged, match="not finite"):
        pretrain(replace(tiny, steps=1, lr=1e38, warmup=0, log_every=1), log=lambda _: None)
    assert not (tiny.out / "result.json").exists()


def test_the_learning_rates_in_metrics_are_the_schedules(tiny: Settings):
    """A line has the rate of its last step, from 0: warm-up in 4 steps, then linearly to 0 at step 12."""
    quiet(replace(tiny, steps=12, warmup=4, decay="linear", lr=0.8, log_every=1, keep=0, save_model=False))
    rates = [line["lr"] for line in read_metrics(tiny.out / "metrics.jsonl", "train")]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1], rel=1e-12)


def test_a_divergence_from_before_a_setting_existed_is_still_known(tiny: Settings):
    breaks = replace(tiny, steps=1, lr=1e38, warmup=0)
    older = {name: value for name, value in breaks.select_affecting("result", "speed").items() if name not in ("objective", "optimiser")}
    tiny.out.mkdir()
    write_sealed(tiny.out / "diverged.json", {"why": "it broke", "settings": older})
    assert read_divergence(breaks) == "it broke"
    assert read_divergence(replace(breaks, lr=1.0)) == ""
