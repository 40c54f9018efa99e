"""Runs of the objective causal: they learn, resume, train in two processes, generate, and say bits a byte."""

import json
import math
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from refusals import refused
from shaped.figures.harness.page import NoData
from shaped.figures.shared import runs as pages
from shaped.files import read_json, write_sealed
from shaped.kernels import chunked_cross_entropy
from shaped.train import glue
from shaped.train.data import prepare as data
from shaped.train.data.prepared import load_data
from shaped.train.run.loop import Run
from shaped.train.run.metrics import read_metrics
from shaped.train.run.settings import Settings
from shaped.train.run.stopping import Diverged, Stopped
from shaped.train.run_records import read_runs
from shaped.train.step.stepper_cache import StepperCache
from shaped.train.tables import table1
from train.conftest import KNOWN, LENGTH, UNIFORM
from train.runs import curve, quiet, start, weights


@pytest.fixture
def causal(tiny: Settings) -> Settings:
    return replace(tiny, objective="causal", positions="rope", steps=60, checkpoint_every=20)


@pytest.mark.parametrize(
    ("settings", "fall"), [({}, 0.6), ({"model": "preln"}, 0.6), ({"positions": "learned", "borders": "respect", "qk_norm": True}, 0.6)]
)
def test_it_learns(causal: Settings, settings: dict, fall: float):
    """To know the words alone is log 40 = 3.69 nats; a document has four words, log 4 = 1.39, which must be seen first."""
    result = quiet(replace(causal, steps=200, **settings))
    assert KNOWN < result.test_loss < UNIFORM - fall


def test_resumed_it_is_bit_exact(causal: Settings, tmp_path: Path):
    other = replace(causal, out=tmp_path / "other")
    quiet(causal)
    with pytest.raises(Stopped, match="step 16 of 60"):
        quiet(replace(other, minutes=0.0))
    quiet(other)
    assert curve(other.out) == curve(causal.out)
    assert all(torch.equal(weights(other.out)[name], value) for name, value in weights(causal.out).items())


def test_two_processes_have_the_loss_curve_of_one(causal: Settings, text: Path, tmp_path: Path):
    """Documents are longer than rows, so that only some rows have a border: the processes have different numbers of labels."""
    data.prepare([str(text)], tmp_path / "data", vocab=80, length=LENGTH // 3, valid_share=0.1, progress=False)
    tiny = replace(causal, data=tmp_path / "data", steps=18, borders="respect", log_every=2, evaluate_every=9)
    quiet(tiny)
    both = replace(tiny, out=tmp_path / "both")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    processes = [start(both, RANK=str(rank), **meeting) for rank in range(2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    one, two = ([line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line] for folder in (tiny.out, both.out))
    assert len(one) == 9 + 2
    assert two == pytest.approx(one, rel=1e-5)
    assert max(one) - min(one) > 0.1


def test_a_finished_run_generates(causal: Settings):
    run = Run(replace(causal, steps=20), 0, 1, lambda line: None, False, StepperCache())
    run.finish()
    model: Any = AutoModelForCausalLM.from_pretrained(causal.out)
    tokenizer: Any = AutoTokenizer.from_pretrained(causal.out)
    assert type(model).__name__ == "ShapedForCausalLM"
    assert all(torch.equal(model.state_dict()[name], value) for name, value in run.stepper.values().items())
    prompts = tokenizer(["ba be", "da"], return_tensors="pt", padding=True)
    assert [tokenizer.convert_ids_to_tokens(ids) for ids in prompts["input_ids"]] == [["[CLS]", "ba", "be"], ["[PAD]", "[CLS]", "da"]]
    made = model.generate(**prompts, max_new_tokens=40, do_sample=False)  # longer than the rows that it was trained with
    assert made.shape[1] <= 3 + 40
    assert (model.config.eos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (3, 3, 0)
    assert tokenizer.decode(made[0], skip_special_tokens=True).startswith("ba be ")


def test_bits_a_byte_are_those_of_the_text(causal: Settings):
    """Every document of the test text has 30 words of 2 letters and a space or line end each, and a blank line."""
    quiet(replace(causal, steps=4, warmup=1, evaluate_every=4))
    (line,) = read_metrics(causal.out / "metrics.jsonl", "test")
    size = 60 * (30 * 3 + 1)
    assert load_data(causal.data).facts["valid"]["bytes"] == size
    assert line["bits_per_byte"] == pytest.approx(line["loss"] * 60 * (LENGTH - 1) / size / math.log(2), rel=1e-12)


def test_a_test_loss_computes_no_gradients(causal: Settings, monkeypatch: pytest.MonkeyPatch):
    """The chunked cross-entropy would compute them with the loss. Settings without a use are named."""
    said: list[str] = []
    run = Run(replace(causal, dyt_alpha=0.3), 0, 1, said.append, False, StepperCache())
    assert said == ["this model has no use for dyt_alpha"]
    compute, wanted = chunked_cross_entropy.compare_logits, []
    monkeypatch.setattr(chunked_cross_entropy, "compare_logits", lambda *given: wanted.append(given[2]) or compute(*given))
    with run.stepper.forward_context():
        expected = run.stepper.loss(*(tensor[0] for tensor in run.test.chunk(0, 1))).item()
    assert run.evaluate(1) == expected
    assert wanted == [True, False]


def test_a_test_loss_is_the_mean_over_labels(causal: Settings, text: Path, tmp_path: Path):
    """Rows are shorter than documents, so that batches have different numbers of borders: a mean of their means is another number."""
    data.prepare([str(text)], tmp_path / "data", vocab=80, length=LENGTH // 3, valid_share=0.1, progress=False)
    short = replace(causal, data=tmp_path / "data", steps=20, warmup=1, batch=4, borders="respect")
    run = Run(short, 0, 1, lambda line: None, False, StepperCache())
    run.finish()
    chunk, losses = run.test.chunk(0, run.test.steps_an_epoch), list[float]()
    with torch.no_grad():
        for tokens, labels, _, positions in zip(*chunk, strict=True):
            logits = run.model(input_ids=tokens, position_ids=positions, use_cache=False).logits
            losses += cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")[
                labels.flatten() >= 0
            ].tolist()
    assert len(chunk[2].unique()) > 1
    assert run.evaluate() == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    means = [sum(part) / len(part) for part in torch.tensor(losses).split(chunk[2].int().tolist())]
    assert abs(float(sum(means)) / len(means) - sum(losses) / len(losses)) > 1e-5


def test_bits_a_byte_are_left_out_where_they_are_not_known(causal: Settings, tmp_path: Path):
    short = replace(causal, steps=4, warmup=1, evaluate_every=4)
    quiet(replace(short, borders="respect", out=tmp_path / "respect"))  # the first tokens of documents are not predicted
    older = tmp_path / "older"
    older.mkdir()
    facts = read_json(causal.data / "data.json")
    del facts["valid"]["bytes"]
    for path in causal.data.iterdir():
        (older / path.name).symlink_to(path)
    (older / "data.json").unlink()
    write_sealed(older / "data.json", facts)
    quiet(replace(short, data=older, out=tmp_path / "run"))
    for run in ("respect", "run"):
        (line,) = read_metrics(tmp_path / run / "metrics.jsonl", "test")
        assert line.keys() == {"step", "kind", "loss"}


def test_a_loss_that_is_not_finite_names_the_layer(causal: Settings):
    run = Run(causal, 0, 1, lambda line: None, False, StepperCache())
    with torch.no_grad():
        for model in (run.model, run.stepper.twin):
            model.get_parameter("model.layers.1.block.attention.output.weight").fill_(3e38)
    with pytest.raises(Diverged, match=r"step 0 is not finite: it began in the output of model.layers.1.block.attention.output"):
        run._advance(lambda *shown: None)


def test_pages_of_the_paper_leave_causal_runs_out(causal: Settings, tmp_path: Path):
    """Their losses are of another task. Beside masked runs they are not counted; alone they are no data."""
    quiet(replace(causal, steps=4, warmup=1))
    found = read_runs([causal.out])
    assert found[0].objective == "causal"
    task = json.loads(table1([run.result for run in found if run.result])[0]["task"])
    assert (task["objective"], task["borders"]) == ("causal", "ignore")
    with pytest.raises(NoData, match="masked language modelling"):
        pages.read_runs(pages.hash_runs((causal.out,)), "results", lambda run: True)
    masked = replace(causal, objective="masked", out=tmp_path / "runs" / "masked", steps=4, warmup=1)
    quiet(masked)
    quiet(replace(causal, out=tmp_path / "runs" / "causal", steps=4, warmup=1))
    kept = pages.read_runs(pages.hash_runs((tmp_path / "runs",)), "results", lambda run: True)
    assert [run.name for run in kept] == ["masked"]


def test_it_is_fine_tuned_on_its_last_token(causal: Settings, tmp_path: Path):
    quiet(replace(causal, steps=60))
    (tmp_path / "glue" / "RTE").mkdir(parents=True)
    for part in ("train", "dev"):
        rows = [f"{i}\t{'ba be' if i % 2 else 'da de'}\t{'bi' if i % 2 else 'di'}\t{('', 'not_')[i % 2]}entailment" for i in range(64)]
        (tmp_path / "glue" / "RTE" / f"{part}.tsv").write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *rows]) + "\n")
    summary = glue.glue(causal.out, glue.GlueSettings("rte", seeds=(0,), epochs=4, lr=3e-3), tmp_path / "glue", log=lambda line: None)
    assert summary["accuracy"]["mean"] > 0.9
    _, mask, _ = glue.encode([("ba", "be", 0), ("ba be bi", "ba", 1)], AutoTokenizer.from_pretrained(causal.out), 8)
    assert mask.sum(1).tolist() == [4, 6]
    assert mask[:, 0].all()  # texts begin at position 0, as in training, though the run's tokenizer pads on the left


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"objective": "causal", "mask_share": 0.2}, ("mask_share", "0.15", "causal", "0.2")),
        ({"borders": "respect"}, ("borders", "ignore", "masked", "respect")),
        ({"rope_base": 500.0}, ("rope_base", "10000", "learned", "500")),
        ({"positions": "rope", "width": 12, "heads": 4}, ("heads", "even", "3")),
        ({"positions": "alibi"}, ("positions", "learned, rope", "alibi")),
    ],
)
def test_settings_that_would_be_ignored_are_refused(given: dict, words: tuple[str, ...]):
    with refused(*words):
        Settings.of({"data": "d", "out": "o"} | given)


def test_the_preset():
    made = Settings.of({"data": "d", "out": "o", "preset": "causal"})
    assert (made.objective, made.positions, made.batch, made.lr) == ("causal", "rope", 8, 4e-3)
