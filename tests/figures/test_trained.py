"""The pages that read finished training runs: their rows, their claims, and when they are made anew."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from refusals import refused
from shaped.figures.harness import reproduce
from shaped.figures.pages import fig6, table1
from shaped.train.run.result import Result
from shaped.train.run.settings import Settings
from shaped.train.run_records import RunRecord, collect, read_runs
from shaped.train.tables import entropy_curves, table2

RUN = Result("shaped", "recover", 18, 768, 100, 5e-4, 0.1, 0, 2.1, 2.05, "shaped pretrain", "abc", {"tau0": 1.0})

GLUE = {"rte": {"task": "rte", "score": "accuracy", "seeds": [0], "accuracy": {"mean": 0.5, "std": None}}}


def write(folder, result, scores=None, entropy=None, depth=18):
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result.to_dict()))
    for task, (score, mean) in (scores or {}).items():
        row = {"task": task, "score": score, "seeds": [0, 1], score: {"mean": mean, "std": 0.01}}
        (folder / f"glue-{task}.json").write_text(json.dumps(row))
    if entropy is not None:
        named = {name: getattr(result, name) for name in ("model", "schedule", "lr", "seed")}
        settings = Settings.of({"data": folder, "out": folder, "depth": depth} | named | (result.settings or {}))
        (folder / "settings.toml").write_text(settings.to_toml())
        lines = [{"step": step, "kind": "layers", "entropy": [value] * depth} for step, value in ((0, 4.8), (100, entropy))]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def runs(tmp_path):
    """Recover at two temperatures and Pre-LN, two seeds each, one learning rate that is large."""
    folder = tmp_path / "runs"
    for seed, off in ((0, 0.001), (1, -0.001)):
        glue = {"rte": ("accuracy", 0.52), "cola": ("matthews", 0.2)}
        write(folder / f"a{seed}", replace(RUN, seed=seed, test_loss=2.05 + off, lr=1e-3), glue, entropy=2.0)
        write(folder / f"b{seed}", replace(RUN, seed=seed, test_loss=1.95 + off, settings={"tau0": 0.1}))
        write(folder / f"c{seed}", replace(RUN, model="preln", seed=seed, test_loss=2.0 + off, lr=1e-3), entropy=0.1)
    return folder


def reproduced(runs, out, *ids, **how):
    lines = []
    reproduce.reproduce(ids, out, runs=[runs], say=lines.append, **how)
    return lines


def claims(out, id):
    return {row["id"]: row for row in json.loads((out / f"{id}.json").read_text())["claims"]}


def test_tables_and_entropies_of_finished_runs(runs, tmp_path):
    out = tmp_path / "out"
    reproduced(runs, out, "table1", "table2", "fig6")
    table = json.loads((out / "table1.json").read_text())["table"]
    best = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    assert (best["Recover"]["τ0"], best["Recover"]["seeds"], best["Recover"]["settings tried"]) == (0.1, 2, 2)
    assert best["Recover"]["test loss"] == pytest.approx(1.95)
    row = claims(out, "table1")["table1.d18.s100"]
    assert row["value"] == pytest.approx(-0.05)
    assert row["verdict"] == "holds"
    assert {id: row["verdict"] for id, row in claims(out, "fig6").items()} == {
        f"fig6.{model}.layer{layer}.lr0.001": "holds" for model in ("preln", "recover") for layer in (1, 7)
    }
    scores = json.loads((out / "table2.json").read_text())["table"]["rows"]
    assert [row[5:8] for row in scores] == [["cola", "matthews", 0.2], ["rte", "accuracy", 0.52]] * 2
    report = (out / "report.html").read_text()
    assert all(word in report for word in ("table1", "table2", "fig6", "Pre-LN"))


def test_models_with_qk_norm_have_rows_and_claims_of_their_own(tmp_path):
    """fig6 expects of none of them that its attention collapses; table1 holds the best shaped model against the best Pre-LN."""
    qk, loss = {"qk_norm": True}, {"shaped": 1.9, "preln": 2.0}
    for seed, model in itertools.product(range(2), loss):
        run = replace(RUN, model=model, lr=1e-3, seed=seed, test_loss=loss[model] + 0.001 * seed, settings=qk)
        write(tmp_path / "runs" / f"{model}-{seed}", run, entropy={"shaped": 2.0, "preln": 0.1}[model] + 0.001 * seed)
        write(tmp_path / "runs" / f"{model}-plain-{seed}", replace(run, test_loss=run.test_loss + 0.5, settings={}))
    reproduced(tmp_path / "runs", tmp_path / "out", "table1", "fig6")
    entropies = claims(tmp_path / "out", "fig6")
    assert {id: row["verdict"] for id, row in entropies.items()} == {
        f"fig6.{model}-qk.layer{layer}.lr0.001": verdict
        for model, verdict in (("recover", "holds"), ("preln", "fails"))
        for layer in (1, 7)
    }
    assert "Pre-LN with QK-norm: it does not" in entropies["fig6.preln-qk.layer1.lr0.001"]["claim"]
    with np.load(tmp_path / "out" / "fig6.npz") as arrays:
        panels = fig6.draw({}, dict(arrays)).axes
    assert [axes.get_title() for axes in panels] == [f"{model} with QK-norm, layer {k}" for model in ("Recover", "Pre-LN") for k in (1, 7)]
    (row,) = claims(tmp_path / "out", "table1").values()
    assert row["value"] == pytest.approx(-0.1)
    assert "(Recover with QK-norm) is as good as Pre-LN with QK-norm" in row["claim"]


def test_runs_are_told_apart_by_what_was_chosen_for_them():
    """A repeated seed is no further seed; what a model does not use, or takes by default, does not tell two of its runs apart."""
    again = [RUN, replace(RUN, test_loss=2.01), replace(RUN, seed=1, test_loss=2.03), replace(RUN, settings={"tau0": 0.1}, test_loss=3.0)]
    for order in (again, again[::-1]):
        (row,) = table1.table1(order)
        assert (row["seeds"], row["tried"], row["gamma"], row["tau0"]) == (2, 2, 0.1, 1.0)
        assert row["test_loss"] == pytest.approx(((2.05 + 2.01) / 2 + 2.03) / 2)
    for model, schedule, name, values in (
        ("preln", "recover", "tau0", (0.1, 0.2)),
        ("preln", "recover", "gain_lr", (0.1, 1.0)),
        ("preln", "recover", "dyt_alpha", (0.5, 0.25)),
        ("shaped", "recover", "norm", ("layer", "rms")),
        ("vanilla", "recover", "tau0", (0.1, 0.2)),
        ("vanilla", "recover", "recover_steps", (100, 200)),
        ("shaped", "learn", "recover_steps", (100, 200)),
        ("shaped", "recover", "shaping_lr", (1.0, 10.0)),
        ("shaped", "recover", "gamma_feedforward", (None, 0.1)),
        ("shaped", "recover", "hidden", (None, 3072)),
    ):
        runs = [replace(RUN, model=model, schedule=schedule, seed=i, settings={name: value}) for i, value in enumerate(values)]
        (row,) = table1.table1(runs)
        assert (row["seeds"], row["tried"]) == (2, 1), name
    assert (row["gamma"], row["tau0"]) == (0.1, 1.0)
    (row,) = table1.table1([replace(RUN, model="preln")])
    assert (row["gamma"], row["tau0"]) == (None, None)
    for chosen in ({"gamma": 0.9}, {"settings": {"gain_lr": 0.0}}, {"settings": {"train_gains": False}}):  # the vanilla network has gains
        (row,) = table1.table1([replace(RUN, model="vanilla"), replace(RUN, model="vanilla", seed=1, test_loss=9.0, **chosen)])
        assert (row["seeds"], row["tried"], row["gamma"], row["tau0"]) == (1, 2, 0.1, None), chosen
    arms = [
        replace(RUN, model="preln", settings=settings)
        for settings in ({}, {"norm": "rms"}, {"qk_norm": True}, {"norm": "rms", "qk_norm": True})
    ]
    names = ["preln", "preln-qk", "preln-rms", "preln-rms-qk", "recover-qk"]
    rows = table1.table1([*arms, replace(RUN, settings={"qk_norm": True, "norm": "rms"})])
    assert [row["name"] for row in rows] == names
    assert [row["paper"] is None for row in rows] == [False, True, True, True, True]  # the paper's models have neither
    runs = [RunRecord("x", {"model": one, "schedule": "fixed"}, result=replace(RUN, model=one), glue=GLUE) for one in ("vanilla", "preln")]
    rows = table2(runs)
    assert [row["gamma"] for row in rows] == [0.1, None]


def test_other_texts_are_other_claims():
    runs = [replace(RUN, model=model, data={"train": text}) for model in ("shaped", "preln") for text in ("a", "b")]
    ids = [row["id"] for row in table1.judge_losses(table1.table1(runs))]
    assert len(set(ids)) == 2
    assert all(id.startswith("table1.d18.s100.") for id in ids)


def test_a_result_that_is_none_is_refused(tmp_path):
    """One from before there were settings, data, device and seconds is one."""
    path, row = tmp_path / "result.json", RUN.to_dict()
    old = {name: row[name] for name in list(row)[:12]}
    path.write_text(json.dumps(old))
    assert Result.read(path) == replace(RUN, settings={})
    for wrong, words in (({"speed": 3}, "it has speed, which no result has"), ({"lr": "x"}, "lr"), ({"settings": []}, "settings")):
        path.write_text(json.dumps(old | wrong))
        with refused("result.json", words):
            Result.read(path)
    del old["lr"]
    path.write_text(json.dumps(old))
    with refused("result.json", "it must have lr"):
        Result.read(path)


def test_claims_that_do_not_hold_or_are_not_proved(tmp_path):
    def value(shaped, preln, seeds=2):
        results = [replace(RUN, test_loss=shaped + 0.001 * seed, seed=seed) for seed in range(seeds)]
        results += [replace(RUN, model="preln", test_loss=preln + 0.001 * seed, seed=seed) for seed in range(seeds)]
        (row,) = table1.judge_losses(table1.table1(results))
        return row["verdict"], row.get("reason", "")

    assert value(2.0, 2.0) == ("holds", "")
    worse, reason = value(2.1, 2.0)
    assert worse == "fails"
    assert "0.1" in reason
    alone, reason = value(1.9, 2.0, seeds=1)
    assert alone == "not proved"
    assert "inside the interval" in reason
    results = [replace(RUN, test_loss=2.0 + 0.001 * seed, seed=seed) for seed in range(2)] + [replace(RUN, schedule="learn", test_loss=1.9)]
    results += [replace(RUN, model="preln", test_loss=2.0 + 0.001 * seed, seed=seed) for seed in range(2)]
    (row,) = table1.judge_losses(table1.table1(results))  # Learn's one seed, though the least, is no reason not to look at Recover's two
    assert row["verdict"] == "holds"
    assert "Recover" in row["claim"]
    curves = [
        {"name": "preln", "layer": 1, "lr": 1e-3, "entropy": [4.8, 3.0], "planned": 100, "ended": True, "seed": 0},
        {"name": "recover", "layer": 1, "lr": 1e-3, "entropy": [0.2], "planned": 100, "ended": True, "seed": 0},
    ]
    assert [row["verdict"] for row in fig6.judge_curves(curves)] == ["not proved", "not proved"]
    assert fig6.judge_curves([{**curves[0], "lr": 1e-4}]) == []  # the caption speaks of a large learning rate
    assert fig6.judge_curves([{**curves[0], "ended": False}]) == []  # and what is said is of the last step
    (row,) = fig6.judge_curves([curves[0], {**curves[0], "entropy": [0.1], "planned": 50}])
    assert row["value"] == 3.0
    for seeds, outcome in (([0], "not proved"), ([0, 0], "not proved"), ([0, 1], "holds")):  # one seed, and that seed again, prove nothing
        (row,) = fig6.judge_curves([{**curves[0], "entropy": [0.1 + 0.01 * i], "seed": seed} for i, seed in enumerate(seeds)])
        assert row["verdict"] == outcome
    assert row["interval"] == pytest.approx([0.105 - 12.706 * 0.005, 0.105 + 12.706 * 0.005], rel=1e-4)
    (row,) = fig6.judge_curves([{**curves[0], "entropy": [0.1 + 0.2 * seed], "seed": seed} for seed in (0, 1)])
    assert row["verdict"] == "not proved"
    (row,) = fig6.judge_curves([{**curves[0], "entropy": [3.0 + 0.01 * seed], "seed": seed} for seed in (0, 1)])
    assert row["verdict"] == "fails"


def test_one_file_of_runs_is_as_good_as_their_folders(runs, tmp_path, monkeypatch, capsys):
    from shaped.commands import app as cli

    file = tmp_path / "results" / "all.json"
    monkeypatch.setattr("sys.argv", ["shaped", "collect", str(runs), "--out", str(file)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    assert "6 runs, 6 finished" in capsys.readouterr().out
    pages = []
    for place, out in ((runs, tmp_path / "one"), (file, tmp_path / "two")):
        reproduced(place, out, "table1", "table2", "fig6")
        made = [json.loads((out / f"{id}.json").read_text()) for id in ("table1", "table2", "fig6")]
        pages.append([(page["claims"], page.get("table")) for page in made])
    assert pages[0] == pages[1]


def test_runs_of_one_name_are_told_apart_by_their_places(runs, tmp_path):
    """In one file they have metrics of their own."""
    for place in ("one", "two"):
        write(tmp_path / place / "deep" / "a0", RUN, entropy={"one": 2.0, "two": 3.0}[place])
    found = read_runs([tmp_path / "one", tmp_path / "two", runs / "c0"])
    assert [run.name for run in found] == ["one/deep/a0", "two/deep/a0", "c0"]
    collect(found, tmp_path / "all.json")
    again = read_runs([tmp_path / "all.json"])
    assert [(run.name, run.metrics[-1]["entropy"][0]) for run in again] == [("one/deep/a0", 2.0), ("two/deep/a0", 3.0), ("c0", 0.1)]
    with refused("runs", "one/deep/a0 2 times"):
        read_runs([tmp_path / "one", tmp_path / "one"])
    with refused("runs", "nowhere"):
        read_runs([tmp_path / "one", tmp_path / "nowhere"])
    with refused("out", ".json", "all.jsonl"):
        collect(found, tmp_path / "all.jsonl")
    (tmp_path / "all.jsonl").unlink()
    with refused("runs", "all.jsonl", "not there"):
        read_runs([tmp_path / "all.json"])


def test_a_run_that_was_finished_elsewhere_is_there_once(tmp_path):
    for number, place in enumerate(("before", "after", "other")):
        write(tmp_path / place / "a0", replace(RUN, lr=[1e-3, 1e-3, 2e-3][number]), entropy=[4.0, 2.0, 1.0][number])
    (tmp_path / "before" / "a0" / "result.json").unlink()
    collect(read_runs([tmp_path / "before"]), tmp_path / "before.json")
    for begun in (tmp_path / "before", tmp_path / "before.json"):
        (found,) = read_runs([begun, tmp_path / "after"])
        assert (found.name, found.result is not None, found.metrics[-1]["entropy"][0]) == ("a0", True, 2.0)
        assert len(read_runs([begun, tmp_path / "other"])) == 2  # one with another learning rate
    (tmp_path / "before" / "a0" / "diverged.json").write_text('{"why": "the loss of step 7 is not finite"}')
    assert len(read_runs([tmp_path / "before", tmp_path / "after"])) == 2  # it has ended


def test_a_run_that_diverged_ends_with_a_cross(tmp_path):
    for why in ("", "the loss of step 7 is not finite"):
        curve = {"name": "recover", "recipe": "", "lr": 1e-3, "layer": 1, "steps": [1, 2], "entropy": [2.0, 1.0], "diverged": bool(why)}
        arrays = fig6.to_arrays([curve])
        marks = [line.get_marker() for line in fig6.draw({}, arrays).axes[0].lines]
        assert ("x" in marks) == bool(why)


def test_the_entropies_are_those_of_the_recipe_with_most_learning_rates():
    def curve(recipe, lr, layer=1):
        return {"name": "recover", "recipe": recipe, "lr": lr, "layer": layer, "entropy": [1.0]}

    tried = [curve("a", 1e-3), curve("b", 1e-3), curve("b", 5e-4), curve("a", 1e-3, 7)]
    assert fig6.select_recipes(tried) == tried[1:3]


def test_entropies_of_other_models_are_no_further_seeds():
    """Runs that differ in their learning rate, steps and seed have one recipe; of another depth, width, batch, they have another."""
    lines = [{"step": 100, "kind": "layers", "entropy": [2.0] * 12}]
    base = {"model": "preln", "schedule": "recover", "lr": 1e-3, "gamma": 0.1, "seed": 0, "depth": 12, "width": 768, "steps": 100}
    others = ({"depth": 8}, {"width": 256}, {"heads": 4}, {"batch": 8}, {"mask_share": 0.3}, {"hidden": 100})
    same = ({"seed": 1}, {"lr": 5e-3}, {"steps": 50}, {"hidden": 3072})
    recipes = [entropy_curves([RunRecord("x", base | change, lines)])[0]["recipe"] for change in ({}, *same, *others)]
    assert recipes[: len(same) + 1] == recipes[:1] * (len(same) + 1)
    assert len(set(recipes)) == 1 + len(others)


def test_a_page_is_made_anew_when_its_runs_change(runs, tmp_path):
    out = tmp_path / "out"
    assert "computed in" not in reproduced(runs, out, "table1")[0]
    assert "computed in" in reproduced(runs, out, "table1")[0]
    (runs / "a0" / "result.json").write_text(json.dumps(replace(RUN, test_loss=1.5).to_dict()))
    assert "computed in" not in reproduced(runs, out, "table1")[0]


def test_all_has_them_only_where_there_are_runs(runs, tmp_path):
    assert reproduce.select_pages(["all"]) == reproduce.FIGURES
    assert reproduce.select_pages([], [runs]) == reproduce.FIGURES + reproduce.TRAINED
    assert reproduce.select_pages(["table1", "fig1"]) == ("fig1", "table1")
    with refused("runs", "shaped pretrain", "--runs"):
        reproduce.reproduce(["table1"], tmp_path / "out", say=lambda _: None)
    (tmp_path / "empty").mkdir()
    with refused("runs", "metrics", "empty"):
        reproduced(tmp_path / "empty", tmp_path / "out", "fig6")
    with refused("runs", "nowhere"):
        reproduced(tmp_path / "nowhere", tmp_path / "out", "fig6")
    (tmp_path / "other.json").write_text('{"claims": []}')
    with refused("runs", "other.json"):
        reproduced(tmp_path / "other.json", tmp_path / "out", "fig6")
    assert not (tmp_path / "out").exists()


def test_a_page_that_the_runs_have_nothing_for_does_not_cost_the_others(runs, tmp_path, monkeypatch):
    """It is left out, and where it was named that is an error, once the others are made."""
    monkeypatch.setattr(reproduce, "FIGURES", ())
    for path in runs.glob("*/glue-*"):
        path.unlink()
    for path in runs.glob("*/metrics.jsonl"):
        path.write_text('{"step": 100, "kind": "train", "loss": 2.0, "count": 1}\n')
    lines = reproduced(runs, tmp_path / "all")
    assert [line.split(":")[0] for line in lines[:2]] == ["fig6    is left out", "table2  is left out"]
    assert 'id="table1"' in (tmp_path / "all" / "report.html").read_text()
    with refused("runs", "shaped glue", "report.html"):
        reproduced(runs, tmp_path / "named", "table1", "table2")
    assert 'id="table1"' in (tmp_path / "named" / "report.html").read_text()
    with refused("runs", "shaped glue"):
        reproduced(runs, tmp_path / "alone", "table2")
    assert not (tmp_path / "alone").exists()


def test_runs_are_looked_at_before_figures_take_their_time(tmp_path, monkeypatch):
    def late(*_):
        raise AssertionError("too late")

    monkeypatch.setattr(reproduce.load_page("fig7"), "compute", late)
    for ids, places, word in (
        (["fig7", "table1"], [tmp_path / "nowhere"], "nowhere"),
        (["fig7", "table1"], [], "--runs"),
        (["fig7"], [tmp_path / "nowhere"], "nowhere"),  # also where no figure would read them
    ):
        with refused("runs", word):
            reproduce.reproduce(ids, tmp_path / "out", runs=places, say=print)
