"""Charts of every panel at every stage: what the page may rely on, and numbers that are the library's."""

import contextlib
import io
import json
import math
import re
from itertools import chain
from unittest import mock

import pytest
import torch

import shaped
from shaped.advice.question import Question as Judge
from shaped.explore.code import write_command, write_python
from shaped.explore.fields import parse_question
from shaped.explore.networks import make_block
from shaped.explore.panels import ANSWERS
from shaped.explore.plan import Plan
from shaped.explore.units import PANELS, STAGES, UNITS

SMALL = {"width": "16", "depth": "6", "tokens": "3", "gamma": "0.5", "seed": "3"}
OTHER = SMALL | {"heads": "2", "mask": "causal", "qk_norm": "true", "tau0": "0.5", "c_plus": "0.5", "rho": "0.1"}
KEYS = {
    "line": {"x", "y", "role"},
    "band": {"x", "low", "high", "role"},
    "paths": {"x", "ys", "role"},
    "steps": {"edges", "heights", "role"},
    "rule": {"role"},
    "cells": {"x_edges", "y_edges", "values", "labels", "outlined"},
    "point": {"x", "y", "role"},
}


def answer(given: dict[str, str], unit: str, stage: int) -> dict[str, dict]:
    return {found.panel: found.chart for found in ANSWERS[unit](Plan(parse_question(given), stage), lambda steps: None)}


@pytest.fixture(autouse=True, scope="module")
def few_samples():
    """A slow machine, as far as the plan knows: the fewest samples of each stage, and no proof."""
    with mock.patch("shaped.explore.plan.NORMAL", 1.0):
        yield


@pytest.fixture(scope="module")
def charts(few_samples) -> dict[tuple[str, int], dict]:
    """The panels at their last stages, for one small question."""
    asked = [("laws", 2), ("gradients", 1), ("gradients", 2), ("blocks", 2)]
    return {(panel, stage): chart for unit, stage in asked for panel, chart in answer(SMALL, unit, stage).items()}


def series(chart: dict, kind: str, role: str) -> dict:
    return next(one for one in chart["series"] if one["kind"] == kind and one.get("role") == role)


def test_units_have_every_panel_once():
    assert sorted(panel for panels in UNITS.values() for panel in panels) == sorted(PANELS)
    assert set(ANSWERS) == set(UNITS) == set(STAGES[0]) == set(STAGES[1])


@pytest.mark.parametrize("given", [SMALL, OTHER], ids=["plain", "heads, mask, QK-norm"])
def test_every_panel_has_a_preview_and_a_finer_chart(given):
    for stage in (0, 1):
        for unit, panels in UNITS.items():
            found = answer(given, unit, stage)
            assert sorted(found) == sorted(panels)
            for chart in found.values():
                check_chart(chart)


def check_chart(chart: dict) -> None:
    json.dumps(chart, allow_nan=False)
    assert set(chart) == {"title", "x", "y", "series", "notes", "about"}
    assert chart["series"]
    for axis in (chart["x"], chart["y"]):
        assert axis["scale"] in ("linear", "log")
        assert axis["label"]
    for one in chart["series"]:
        assert one["name"]
        assert KEYS[one["kind"]] <= set(one)
        if one["kind"] in ("line", "band"):
            assert {len(one[name]) for name in KEYS[one["kind"]] - {"role"}} == {len(one["x"])}
    assert all("\n" not in note for note in [*chart["notes"], chart["about"]])


def test_a_cancelled_question_ends_between_any_two_panels_of_the_laws():
    """What is drawn of 2048 paths takes tenths of a second in all, with no step of a simulation between."""
    breaths, found = 0, []

    def breathe(steps: int) -> None:
        nonlocal breaths
        breaths += 1

    for _ in ANSWERS["laws"](Plan(parse_question(SMALL), 0), breathe):
        found.append(breaths)
    assert len(set(found)) == len(found) == len(UNITS["laws"])


def test_less_time_is_never_for_more_samples():
    """Also where the overhead of the layers alone takes more than the time."""
    plan = Plan(parse_question({"width": "512", "depth": "512", "tokens": "32", "heads": "4"}), 1)
    with mock.patch("shaped.explore.plan.NORMAL", 1e-9):
        counts = [plan.count(seconds, 1, 10**6) for seconds in (0.01, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0)]
    assert counts == sorted(counts)
    assert counts[0] == counts[2] < counts[-1]


def test_correlations_are_those_of_solve_and_propagate(charts):
    plan = Plan(parse_question(SMALL), 2)
    block, V0 = shaped.ShapedAttention(0.5) >> shaped.ShapedFeedForward(0.5), shaped.equicorrelated(3, 0.2)
    network = shaped.propagate(block, V0, n=16, d=6, samples=plan.networks, seed=3, upper=1e4)
    limit = shaped.solve(block, V0, T=6 / 16, steps=plan.steps, samples=plan.paths, seed=3, upper=1e4, check=False)
    pairs = torch.triu_indices(3, 3, 1)
    for role, paths in (("network", network), ("sde", limit)):
        median = paths.rho[-1, paths.stopped.isinf()][:, *pairs].mean(-1).quantile(0.5).item()
        assert series(charts["paths", 2], "line", role)["y"][-1] == pytest.approx(median, rel=1e-4)
        largest = torch.linalg.eigvalsh(paths.V)[..., -1].quantile(0.95, dim=-1)
        assert len(paths.stopped) > 1
        assert series(charts["eigenvalue", 2], "band", role)["high"][-1] == pytest.approx(largest[-1].item(), rel=1e-4)
    assert series(charts["paths", 2], "line", "network")["x"] == list(range(7))
    heights, edges = (series(charts["density", 2], "steps", "network")[name] for name in ("heights", "edges"))
    assert sum(h * (b - a) for h, a, b in zip(heights, edges, edges[1:], strict=False)) == pytest.approx(1.0, rel=1e-3)


def test_the_shown_program_gives_the_numbers_of_the_last_stage(charts):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(write_python(parse_question(SMALL)), {"__name__": "shown"})
    lines = printed.getvalue()
    medians = dict(re.findall(r"^(SDE|networks): median of the mean correlation at the last layer ([-\d.e]+)", lines, re.M))
    assert charts["density", 2]["notes"][0] == f"median: SDE {float(medians['SDE'])}, networks {float(medians['networks'])}"
    (distance,) = re.findall(r"mean rho  Kolmogorov-Smirnov  ([\d.]+)", lines)
    assert f"Kolmogorov-Smirnov distance {float(distance):.3f} " in charts["density", 2]["notes"][1]
    first, last = map(float, *re.findall(r"norm of the gradient: ([\d.e-]+) at the first tokens, ([\d.e-]+) at", lines))
    tokens = series(charts["gradients", 2], "line", "tokens")["y"]
    assert (tokens[0], tokens[-1]) == pytest.approx((first, last), rel=1e-3)
    others = re.findall(r"^(shaped|unshaped|Pre-LN|Post-LN): mean correlation ([-\d.e]+), gradient .* ([\d.e-]+)$", lines, re.M)
    roles = {"shaped": "shaped", "unshaped": "unshaped", "Pre-LN": "preln", "Post-LN": "postln"}
    assert len(others) == 4
    for name, rho, ratio in others:
        assert series(charts["blocks", 2], "line", roles[name])["y"][-1] == pytest.approx(float(rho), rel=1e-3)
        assert series(charts["blocks_gradients", 1], "line", roles[name])["y"][0] == pytest.approx(float(ratio), rel=1e-3)


def test_the_shown_program_and_command_have_every_value():
    asked = parse_question(OTHER)
    program, command = write_python(asked), write_command(asked)
    assert "heads=2, project=True, mask='causal', qk_norm=True" in program
    assert "--heads 2 --project --mask causal --qk-norm --step" in command
    compile(program, "shown", "exec")


def test_a_cell_of_the_map_is_the_share_that_fails_by_the_rule_of_advise():
    """All temperatures of one gamma are one simulation; one of them by itself has the same law, and here the same numbers too."""
    plan = Plan(parse_question(SMALL | {"depth": "40", "tokens": "4"}), 1)
    with mock.patch("shaped.explore.plan.NORMAL", 1e-9):
        count, chart = plan.cell, next(iter(ANSWERS["map"](plan, lambda steps: None))).chart
    cells = chart["series"][0]
    assert len(cells["values"]) == len(cells["y_edges"]) - 1 == len(cells["outlined"])
    assert {len(line) for line in cells["values"]} == {len(cells["x_edges"]) - 1}
    gamma, temperatures = 2.0**-0.5, [4.0**step for step in range(-2, 3)]
    scales = torch.tensor(temperatures, dtype=torch.float64).repeat_interleave(count)[:, None, None]
    block = shaped.ShapedAttention(gamma) >> shaped.ShapedFeedForward(gamma)
    start = shaped.equicorrelated(4, 0.2) / scales
    paths = shaped.propagate(block, start, n=16, d=40, seed=3, record="last", dtype=torch.float32)
    V = (paths.V[-1].double() * scales).unflatten(0, (5, count))
    rho = shaped.correlation(V)
    aligned = (rho.abs().sum((-2, -1)) - 4) / 12 > 0.9
    exploded = V.diagonal(dim1=-2, dim2=-1).mean(-1).sqrt() > 10.0
    shares = [line[-1] for line in cells["values"]]
    assert shares == (aligned | exploded).double().mean(-1).tolist()
    assert len(set(shares)) > 2  # a small temperature fails more often
    assert count == 8
    assert (Judge(16, 40, 4, 1, None).correlation, Judge(16, 40, 4, 1, None).growth) == (0.9, 10.0)


def test_tokens_of_another_length_stand_for_another_temperature():
    """V0/tau0 at temperature 1 is V0 at tau0, divided by tau0: to rounding, with the same random numbers."""
    asked = parse_question(SMALL | {"mask": "causal"})
    V0, tau0 = shaped.equicorrelated(3, 0.2), 0.25
    one = shaped.propagate(make_block(asked, 0.5, tau0), V0, n=16, d=6, samples=8, seed=0)
    other = shaped.propagate(make_block(asked, 0.5, 1.0), V0 / tau0, n=16, d=6, samples=8, seed=0)
    torch.testing.assert_close(other.V * tau0, one.V)


def test_a_cell_is_outlined_only_with_its_proof():
    plan = Plan(parse_question(SMALL | {"depth": "1", "width": "64"}), 1)
    with mock.patch("shaped.explore.plan.NORMAL", 1e-9):
        (first, _), (last, stage) = ((found.chart, found.stage) for found in ANSWERS["map"](plan, lambda steps: None))
    assert stage == 2
    assert not any(map(any, first["series"][0]["outlined"]))
    cells = last["series"][0]
    for outlined, label in zip(chain(*cells["outlined"]), chain(*cells["labels"]), strict=True):
        assert outlined == (" of 299 networks fail" in label and label.endswith("; safe"))
    assert any(map(any, cells["outlined"]))


def test_a_proof_has_fresh_networks_and_goes_down_until_it_holds():
    """By counts that a stand-in gives: with few networks none fails; with many some do at the largest gamma, as `advise` may find too."""
    plan = Plan(parse_question(SMALL | {"qk_norm": "true"}), 1)
    simulated = []

    def stand_in(plan, block, scales, breathe, fresh):
        gamma, count = block.layers[0].gamma, len(scales)
        simulated.append((gamma, count, fresh))
        V = torch.eye(3, dtype=torch.float64).repeat(1, count, 1, 1)
        V[:, : 5 if fresh and gamma > 0.6 else 0] *= 1e3
        return shaped.Trajectory(torch.ones(1), V, torch.full((count,), math.inf))

    with mock.patch("shaped.explore.panels.safety.simulate", stand_in), mock.patch("shaped.explore.plan.NORMAL", 1e-9):
        cells = [*ANSWERS["map"](plan, lambda steps: None)][-1].chart["series"][0]
    assert {count for _, count, fresh in simulated if fresh} == {299}
    assert all(fresh == (count == 299) for _, count, fresh in simulated)
    assert cells["outlined"] == [[False, False, False, True, False]] * 5


def test_entropy_of_uniform_attention_is_one_and_falls_with_the_temperature():
    def median(tau0: float) -> float:
        chart = answer(SMALL | {"tau0": str(tau0), "mask": "causal"}, "laws", 1)["entropy"]
        least = min(value for one in chart["series"] for value in one.get("low", one.get("y")))
        low, high = chart["y"]["low"], chart["y"]["high"]
        assert low < least < 1.0 < high  # the axis has room on both sides of the curves, and is no longer than they need
        assert 1.0 - low <= max(2e-3, 1.2 * (1.0 - least))
        return series(chart, "line", "network")["y"][0]

    assert median(20.0) == pytest.approx(1.0, abs=1e-4)
    assert median(0.05) < 0.9


def test_entropy_of_an_attention_layer_is_that_of_its_module():
    """Explicit queries and keys of many networks, against the draws without weights."""
    n, heads, count = 12, 2, 4000
    layer = shaped.ShapedAttention(0.5, 0.1, heads, True, "causal")
    V = shaped.equicorrelated(3, 0.2)
    drawn = layer.entropy(V.expand(count, 3, 3), n=n, seed=1)
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    Q, _ = torch.linalg.qr(normal(n, 3))
    X = math.sqrt(n) * torch.linalg.cholesky(V) @ Q.T
    queries, keys = (X @ normal(count, heads, n, n // heads) / math.sqrt(n) for _ in range(2))
    logits = queries @ keys.mT / (0.1 * math.sqrt(n * n // heads))
    logits = logits.masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), -math.inf)
    explicit = torch.special.entr(logits.softmax(-1)).sum(-1).mean((-2, -1))
    error = math.sqrt((drawn.var() + explicit.var()).item() / count)
    assert abs((drawn.mean() - explicit.mean()).item()) < 5 * error
    assert error < 0.05 * explicit.mean().item()


def test_a_start_that_the_rule_of_advise_refuses_is_an_error_of_the_map():
    with pytest.raises(ValueError, match=r"^correlation must lie above rho"):
        answer(SMALL | {"rho": "0.95"}, "map", 0)
