"""`shaped reproduce`: what is computed, what is kept, and what the report is made of."""

import hashlib
import io
import json
import re

import numpy as np
import pytest
from tiny import SMALLEST, plain_pictures

from refusals import refused
from shaped.figures.harness import cache, reproduce, simulator
from shaped.figures.harness.simulator import Simulator
from shaped.files import write_json, write_sealed
from shaped.workers import LocalWorkers

QUICK = ("fig7", "fig8")


@pytest.fixture(autouse=True)
def computed_ids(monkeypatch):
    """Tiny figures of one number of tokens, in plain pictures; yields the list of what was computed."""
    monkeypatch.setattr(simulator, "CLAIMED_TOKENS", ())
    plain_pictures(monkeypatch.setattr, *QUICK)
    done = []
    for id in QUICK:
        page = reproduce.load_page(id)

        def compute(settings, simulator, id=id, whole=page.compute):
            done.append(id)
            return whole(settings, simulator)

        monkeypatch.setattr(page, "compute", compute)
        monkeypatch.setattr(page, "settings", lambda scale, id=id: SMALLEST[id])
    return done


def run(out, *ids, **how):
    lines = []
    report = reproduce.reproduce(ids or QUICK, out, say=lines.append, **how)
    return report, lines


def test_a_figure_on_disk_is_not_computed_again(tmp_path, computed_ids):
    _, first = run(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.npz")}
    _, second = run(tmp_path)
    assert computed_ids == ["fig7", "fig8"]
    assert "computed in" in second[0]
    assert first[-2] == second[-2]
    assert first[-1].endswith("all figures are new")
    assert second[-1].endswith("nothing new since the last report")
    run(tmp_path, "fig7", again=True)
    assert computed_ids == ["fig7", "fig8", "fig7"]
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.npz")} == before, "the same seed gives the same bits"


@pytest.mark.parametrize("how", [{"seed": 1}, {"tokens": 3}, {"scale": "paper"}])
def test_other_settings_are_computed(tmp_path, computed_ids, how):
    run(tmp_path, "fig7")
    run(tmp_path, "fig7", **how)
    assert computed_ids == ["fig7", "fig7"]


def test_a_damaged_file_is_computed_again(tmp_path, computed_ids):
    run(tmp_path, "fig7")
    key = reproduce.make_key("fig7", "quick", Simulator())
    for name in ("fig7.npz", "fig7.json"):
        path, whole = tmp_path / name, (tmp_path / name).read_bytes()
        assert cache.load(tmp_path, "fig7", key) is not None
        for damaged in (whole[: len(whole) // 2], b"", whole[:-40] + b"x" * 40, b"{}", b"[" * 100_000):
            path.write_bytes(damaged)
            with refused(name, "must"):
                cache.load(tmp_path, "fig7", key)
        path.write_bytes(whole)
    (tmp_path / "fig7.npz").write_bytes(b"half")
    _, lines = run(tmp_path, "fig7")
    assert "fig7    is computed anew: fig7.npz must be the arrays" in lines[0]
    assert computed_ids == ["fig7", "fig7"]
    assert cache.load(tmp_path, "fig7", key) is not None
    (tmp_path / "fig7.json").unlink()
    assert cache.load(tmp_path, "fig7", key) is None


def test_a_changed_number_is_noticed(tmp_path, computed_ids):
    """JSON as good as before, with another digit in a claim."""
    run(tmp_path, "fig7")
    path = tmp_path / "fig7.json"
    before = json.loads(path.read_text())
    path.write_text(re.sub(r'("value": 0\.0\d)\d', r"\g<1>x", path.read_text(), count=1).replace("x", "9"))
    assert json.loads(path.read_text()) != before
    _, lines = run(tmp_path, "fig7")
    assert "is computed anew" in lines[0]
    assert computed_ids == ["fig7", "fig7"]
    assert json.loads(path.read_text())["claims"] == before["claims"]


def forge(out, arrays: bytes | None = None, **changed):
    """A summary that was not made by us, with a seal and a hash that are right."""
    summary = json.loads((out / "fig7.json").read_text()) | changed
    del summary["seal"]
    if arrays is not None:
        (out / "fig7.npz").write_bytes(arrays)
        summary["arrays_sha256"] = hashlib.sha256(arrays).hexdigest()
    write_sealed(out / "fig7.json", summary)


def test_what_has_lost_its_seal_or_its_tokens_is_left_out_of_the_report(tmp_path):
    """With a word. That what is trained has null for its tokens does not make them dispensable."""
    run(tmp_path)
    path = tmp_path / "fig7.json"
    whole = json.loads(path.read_text())
    others = {name: value for name, value in whole.items() if name not in ("seal", "tokens")}
    claims = [{name: value for name, value in row.items() if name != "tokens"} for row in whole["claims"]]
    unsealed = others | {"tokens": whole["tokens"]}
    for write, summary, words in (
        (write_json, unsealed, "must have the entry 'seal'"),
        (write_sealed, others, "fig7.json must have tokens"),
        (write_sealed, unsealed | {"claims": claims}, "a claim in fig7.json must have tokens"),
    ):
        write(path, summary)
        report, lines = run(tmp_path, "fig8")
        assert any(line.startswith("fig7    is not in the report") and words in line for line in lines)
        assert 'id="fig7"' not in report.read_text()


def test_foreign_files_with_the_right_hash_are_computed_again(tmp_path, computed_ids):
    """Truncated or other arrays; entries of other types."""
    run(tmp_path, "fig7")
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    right, arrays = json.loads((tmp_path / "fig7.json").read_text()), (tmp_path / "fig7.npz").read_bytes()
    claim, buffer = right["claims"][0], io.BytesIO()
    np.savez(buffer, other=np.zeros(3))
    forged = [{"arrays": arrays[: len(arrays) // 2]}, {"arrays": b""}, {"arrays": buffer.getvalue()}]
    forged += [{name: value} for name in ("claims", "settings", "table") for value in (3, [3], [{}], None)]
    wrong = [{"verdict": "fails"}, {"verdict": None}, {"interval": [0]}, {"interval": ["a", "b"]}, {"relation": "near"}]
    forged += [{"claims": [claim | change]} for change in (*wrong, {"value": "1"}, {"tokens": "4"})]
    forged += [{"table": {"columns": ["a"], "rows": [[1, 2]]}}, {"table": {"columns": ["a"], "rows": [[{}]]}}]
    forged += [{"seconds": "soon"}, {"figure": "fig8"}, {"more": 1}]
    for changed in forged:
        for path, content in kept.items():
            path.write_bytes(content)
        forge(tmp_path, **changed)
        lines = []
        assert reproduce.load_and_draw("fig7", tmp_path, reproduce.make_key("fig7", "quick", Simulator()), lines.append) is None, changed
        assert len(lines) == 1
        assert re.fullmatch(r"fig7    is computed anew: .*fig7\.(json|npz) must .*, got .*", lines[0])
    run(tmp_path, "fig7")
    assert computed_ids == ["fig7", "fig7"]
    assert json.loads((tmp_path / "fig7.json").read_text())["claims"] == right["claims"]


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, computed_ids, monkeypatch):
    page = reproduce.load_page("fig8")
    with monkeypatch.context() as patch:

        def interrupt(*_):
            raise KeyboardInterrupt

        patch.setattr(page, "compute", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    assert not list(tmp_path.glob(".*")) + list(tmp_path.glob("fig8*"))
    run(tmp_path)
    assert computed_ids == ["fig7", "fig8"]


def test_the_report_has_what_earlier_runs_left(tmp_path):
    run(tmp_path, "fig7")
    report, _ = run(tmp_path, "fig8")
    assert 'id="fig7"' in report.read_text()


def test_a_failing_claim_is_shown_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("shaped.figures.harness.claims.TOLERANCE", -1.0)
    report, lines = run(tmp_path, "fig7")
    assert any("fig7.law.m4 fails: " in line for line in lines)
    assert lines[-2] == "in all  2 claims: holds 0, not proved 0, fails 2"
    assert lines[-1] == f"report: {report}: 2 claims: holds 0, not proved 0, fails 2; all figures are new"
    assert "2 claims: holds 0, not proved 0, fails 2" in report.read_text()


def test_workers_change_no_bit():
    page = reproduce.load_page("fig7")
    here = page.compute(SMALLEST["fig7"], Simulator())
    with LocalWorkers(2) as workers:
        told = []
        there = page.compute(SMALLEST["fig7"], Simulator(executor=workers, advance=lambda done, total: told.append((done, total))))
    assert told == [(1, 2), (2, 2)]
    assert here.claims == there.claims
    assert all(np.array_equal(here.arrays[name], there.arrays[name]) for name in here.arrays)


def test_figures_by_their_ids(tmp_path):
    assert reproduce.select_pages(["fig8", "fig1", "fig8"]) == ("fig1", "fig8")
    assert reproduce.select_pages([]) == reproduce.select_pages(["all"]) == reproduce.FIGURES
    with refused("figures", "fig99", "fig1", "masks"):
        reproduce.select_pages(["fig1", "fig99"])
    for how, words in (
        ({"scale": "huge"}, ["scale", "huge"]),
        ({"tokens": 1}, ["tokens", "1"]),
        ({"device": "abacus"}, ["device", "abacus"]),
    ):
        with refused(*words):
            run(tmp_path, **how)
    assert list(tmp_path.iterdir()) == []


def test_other_code_or_thresholds_are_computed_anew(tmp_path, computed_ids, monkeypatch):
    run(tmp_path, "fig7")
    monkeypatch.setattr(reproduce, "hash_code", lambda module: "other")
    run(tmp_path, "fig7")
    assert computed_ids == ["fig7", "fig7"]


def test_the_report_leaves_out_what_is_damaged_and_says_so(tmp_path):
    """Figures of earlier runs, which are not made anew now."""
    run(tmp_path)
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    picture = kept[tmp_path / "fig7.png"]
    half = len(picture) // 2
    for name, content, word in (
        ("fig7.json", b"{}", "fig7.json must"),
        ("fig7.json", kept[tmp_path / "fig8.json"], "figure fig7"),
        ("fig7.png", picture[:-20], "whole PNG"),
        ("fig7.png", picture[:half] + bytes([picture[half] ^ 1]) + picture[half + 1 :], "whole PNG"),
        ("fig7.png", picture + b"more", "whole PNG"),
        ("fig7.png", b"", "whole PNG"),
        ("fig7.png", kept[tmp_path / "fig8.png"], "another picture"),
    ):
        for path, whole in kept.items():
            path.write_bytes(whole)
        (tmp_path / name).write_bytes(content)
        report, lines = run(tmp_path, "fig8")
        assert 'id="fig7"' not in report.read_text()
        assert lines[-2].startswith("fig7    is not in the report: ")
        assert word in lines[-2]
        assert lines[-1].endswith("new since the last report: fig7 (no longer in it)")
