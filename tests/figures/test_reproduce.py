"""`shaped reproduce`: what is computed, what is kept, and what the report is made of."""

import json
import re

import numpy as np
import pytest
from tiny import SETTINGS

from refusals import refused
from shaped.figures import lab, reproduce, store
from shaped.figures.lab import Lab
from shaped.figures.report import write_report
from shaped.workers import LocalWorkers

QUICK = ("fig7", "fig8")


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Tiny figures of one number of tokens; yields the list of what was computed."""
    monkeypatch.setattr(lab, "CLAIMED_TOKENS", ())
    done = []
    for id in QUICK:
        page = reproduce.page(id)

        def compute(settings, lab, id=id, whole=page.compute):
            done.append(id)
            return whole(settings, lab)

        monkeypatch.setattr(page, "compute", compute)
        monkeypatch.setattr(page, "settings", lambda scale, id=id: SETTINGS[id])
    return done


def run(out, *ids, **how):
    lines = []
    report = reproduce.reproduce(ids or QUICK, out, say=lines.append, **how)
    return report, lines


def test_a_figure_on_disk_is_not_computed_again(tmp_path, counted):
    _, first = run(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.npz")}
    _, second = run(tmp_path)
    assert counted == ["fig7", "fig8"]
    assert "computed in" in second[0]
    assert first[-1] == second[-1]
    run(tmp_path, "fig7", again=True)
    assert counted == ["fig7", "fig8", "fig7"]
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.npz")} == before, "the same seed gives the same bits"


@pytest.mark.parametrize("how", [{"seed": 1}, {"tokens": 3}, {"scale": "paper"}])
def test_other_settings_are_computed(tmp_path, counted, how):
    run(tmp_path, "fig7")
    run(tmp_path, "fig7", **how)
    assert counted == ["fig7", "fig7"]


def test_a_damaged_file_is_computed_again(tmp_path, counted):
    run(tmp_path, "fig7")
    key = reproduce.key("fig7", "quick", Lab())
    for name in ("fig7.npz", "fig7.json"):
        path, whole = tmp_path / name, (tmp_path / name).read_bytes()
        assert store.load(tmp_path, "fig7", key) is not None
        for damaged in (whole[: len(whole) // 2], b"", whole[:-40] + b"x" * 40, b"{}"):
            path.write_bytes(damaged)
            assert store.load(tmp_path, "fig7", key) is None
        path.unlink()
        assert store.load(tmp_path, "fig7", key) is None
        path.write_bytes(whole)
    (tmp_path / "fig7.npz").write_bytes(b"half")
    run(tmp_path, "fig7")
    assert counted == ["fig7", "fig7"]
    assert store.load(tmp_path, "fig7", key) is not None


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, counted, monkeypatch):
    page = reproduce.page("fig8")
    with monkeypatch.context() as patch:

        def interrupt(*_):
            raise KeyboardInterrupt

        patch.setattr(page, "compute", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    assert not list(tmp_path.glob(".*")) + list(tmp_path.glob("fig8*"))
    run(tmp_path)
    assert counted == ["fig7", "fig8"]


def test_the_report_needs_nothing_else(tmp_path):
    report, _ = run(tmp_path)
    text = report.read_text()
    assert "http" not in text
    assert "<script" not in text
    assert re.findall(r'(?:src|href)="(data:image/png;base64|#)', text).count("data:image/png;base64") == 2
    assert not re.findall(r'(?:src|href)="(?!data:image/png;base64,|#)', text)
    for id in QUICK:
        for row in json.loads((tmp_path / f"{id}.json").read_text())["claims"]:
            assert row.keys() >= {"id", "claim", "value", "interval", "threshold", "holds"}
            assert f"{row['value']:.4g}" in text
    assert ">holds<" in text


def test_the_report_has_what_earlier_runs_left(tmp_path):
    run(tmp_path, "fig7")
    report, _ = run(tmp_path, "fig8")
    assert 'id="fig7"' in report.read_text()


def test_a_failing_claim_is_shown_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("shaped.figures.claims.TOLERANCE", -1.0)
    report, lines = run(tmp_path, "fig7")
    assert any("fig7.law.m4 fails" in line for line in lines)
    assert "fails: the distance" in report.read_text()


def test_workers_change_no_bit():
    page = reproduce.page("fig7")
    here = page.compute(SETTINGS["fig7"], Lab())
    with LocalWorkers(2) as workers:
        told = []
        there = page.compute(SETTINGS["fig7"], Lab(executor=workers, advance=lambda done, total: told.append((done, total))))
    assert told == [(1, 2), (2, 2)]
    assert here.claims == there.claims
    assert all(np.array_equal(here.arrays[name], there.arrays[name]) for name in here.arrays)


def test_figures_by_their_ids(tmp_path):
    assert reproduce.chosen(["fig8", "fig1", "fig8"]) == ("fig1", "fig8")
    assert reproduce.chosen([]) == reproduce.chosen(["all"]) == reproduce.FIGURES
    with refused("figures", "fig99", "fig1", "masks"):
        reproduce.chosen(["fig1", "fig99"])
    for how, words in (
        ({"scale": "huge"}, ["scale", "huge"]),
        ({"tokens": 1}, ["tokens", "1"]),
        ({"device": "abacus"}, ["device", "abacus"]),
    ):
        with refused(*words):
            run(tmp_path, **how)
    assert list(tmp_path.iterdir()) == []


def test_other_code_or_thresholds_are_computed_anew(tmp_path, counted, monkeypatch):
    run(tmp_path, "fig7")
    monkeypatch.setattr(reproduce, "code", lambda trained: "other")
    run(tmp_path, "fig7")
    assert counted == ["fig7", "fig7"]


def test_the_report_leaves_out_what_is_no_figure(tmp_path, counted):
    run(tmp_path, "fig7")
    (tmp_path / "fig1.png").write_bytes((tmp_path / "fig7.png").read_bytes())
    right = json.loads((tmp_path / "fig7.json").read_text())
    (row, *_) = right["claims"]
    wrong = [right | {name: value} for name in ("claims", "settings", "table", "title") for value in (3, [3], [{}])]
    wrong += [right | {"claims": [{name: entry for name, entry in row.items() if name != gone}]} for gone in ("holds", "claim", "interval")]
    for content in ({}, [], *wrong):
        (tmp_path / "fig1.json").write_text(json.dumps(content))
        assert 'id="fig1"' not in write_report(tmp_path, reproduce.FIGURES).read_text(), content
    (tmp_path / "fig1.json").write_text(json.dumps(right))
    assert 'id="fig1"' in write_report(tmp_path, reproduce.FIGURES).read_text()
