"""verify_gradients.py can fail: it sees a wrong law, and says so."""

import pytest
import torch
from verify_gradients import Finished, Setting, compare, judge, make_settings, observe

import shaped
from shaped.testing.stats import generator


def make_result(p=0.5, z=0.0, control=0.0):
    found = {"block": "shaped", "m": 3, "n": 16, "loss": "squared error"}
    worst = {"name": "tokens 0", "D": 0.1, "p": control}
    ks = {f"query {layer}": {"D": 0.01, "p": 0.9} for layer in range(9)} | {"loss": {"D": 0.02, "p": p}}
    correlations = {"query 0, loss": {"autograd": 0.5, "law": 0.5, "z": z, "p": p}}
    return found | {"ks": ks, "correlations": correlations, "gamma 5 % off": worst, "independent": worst}


@pytest.mark.parametrize(
    ("result", "count"), [(make_result(), 0), (make_result(p=1e-4, z=4.0), 2), (make_result(p=1e-3), 0), (make_result(control=0.5), 2)]
)
def test_judge_divides_the_false_alarm_by_the_number_of_comparisons(result, count):
    """11 comparisons: what is below 0.01/11 is wrong, and so is a wrong law that is not."""
    summary, wrong = judge([result], 10_000)
    assert len(wrong) == count
    assert summary["rejected below p"] == pytest.approx(0.01 / 11, rel=1e-3)
    assert summary["band of D"] == pytest.approx(0.0277, rel=1e-2)
    assert sum(summary["p-values of D in ten bins"]) == 10


def test_compare_sees_a_law_of_other_correlations():
    """The distributions of single quantities are the same."""
    a, b, loss, V = torch.randn(4, 20_000, generator=generator(95), dtype=torch.float64)
    one, other = ({"query 0": 0.6 * loss + 0.8 * x, "loss": loss, "trace": V, "rho": 1e-12 * V} for x in (a, b))
    wrong = other | {"query 0": a}
    assert min(entry["p"] for entry in compare(one, other)["ks"].values()) > 1e-5
    assert compare(one, other)["correlations"]["query 0, loss"]["p"] > 1e-5 > compare(one, wrong)["correlations"]["query 0, loss"]["p"]
    assert compare(one, wrong)["ks"]["query 0"]["p"] > 1e-5
    assert "rho" not in compare(one, other)["ks"]


def test_networks_are_differentiated_in_parts(monkeypatch):
    """Whatever the parts, every weight and every fourth layer has its numbers; with one token queries and keys have none."""
    monkeypatch.setattr("verify_gradients.MOST", 3)
    for m, weights in ((1, ("value", "first", "second")), (3, ("query", "key", "value", "first", "second"))):
        setting = Setting("Post-LN", m, 16, "cross-entropy", 0, 7, "cpu")
        found = setting.differentiate()
        assert list(found) == list(setting.simulate())
        assert list(found)[: -2 if m == 1 else -3] == [f"{name} {layer}" for name in (*weights, "tokens") for layer in (0, 4, 8, 11)]
        assert all(len(row.unique()) == 7 for row in found.values())


def test_gradients_that_underflow_have_the_smallest_logarithm():
    zero, one = torch.zeros(2, 5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    V, never = torch.eye(3, dtype=torch.float64).expand(5, 3, 3), torch.full((5,), torch.inf)
    found = observe(shaped.Gradients(torch.arange(2), zero + 1.0, {"query": zero[:1], "value": zero[:1] + 1e-30}, {}, one, V, never))
    assert found["query 0"].tolist() == found["value 0"].tolist() == [-50.0] * 5
    assert found["tokens 0"].tolist() == [0.0] * 5


def test_settings_have_seeds_of_their_own():
    settings = list(make_settings(100, "cpu", subset=False))
    assert len({setting.number for setting in settings}) == len(settings) == 60
    assert len(list(make_settings(100, "cpu", subset=True))) == 15


def test_a_run_goes_on_with_what_was_finished(tmp_path, monkeypatch):
    """An interrupted line is found again, and an old result keeps its commit: the code may have changed since."""
    path = tmp_path / "found.jsonl"
    monkeypatch.setattr("verify_gradients.find_commit", lambda: "old")
    Finished(path).find("one", lambda: {"ks": {"D": 0.1}})
    with path.open("a") as file:
        file.write('\n{"two": {"ks": {"loss": {"D": 0.1}}')
    monkeypatch.setattr("verify_gradients.find_commit", lambda: "new")
    for _ in range(2):
        finished = Finished(path)
        assert finished.find("one", dict) == {"ks": {"D": 0.1}, "commit": "old"}
        assert finished.find("two", dict) == {"commit": "new"}
