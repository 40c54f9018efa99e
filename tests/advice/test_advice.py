"""`shaped.advise`: intervals, search, what is simulated, and what it says."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import shaped
from refusals import refused
from shaped.advice.measurement import STAGES, Ledger, Place
from shaped.advice.question import Question, mean_absolute_correlation
from shaped.advice.result import Advice
from shaped.advice.rows import Boundary, GradientSpread, Row
from shaped.advice.search import GRID, Trial, check_temperatures, count_for_proof, find_boundary, prove
from shaped.hf import ShapedConfig
from shaped.hf.prediction.families import describe_network
from shaped.intervals import exact_interval, median_interval
from shaped.layers import AttentionBranch
from shaped.nn import ShapedDecoder
from shaped.trajectory import Trajectory

SMALL: dict[str, Any] = {"n": 16, "d": 8, "m": 3, "heads": 2, "share": 0.2}


def at_most(k: int, count: int, p: float) -> float:
    return sum(math.comb(count, i) * p**i * (1 - p) ** (count - i) for i in range(k + 1))


@pytest.mark.parametrize(("happened", "count"), [(0, 299), (1, 1), (4, 137), (5, 100), (16, 16), (500, 4096)])
def test_the_ends_of_an_exact_interval_are_wrong_with_the_given_risk(happened: int, count: int):
    low, high = exact_interval(happened, count)
    if happened and count < 1000:
        assert 1 - at_most(happened - 1, count, low) == pytest.approx(0.05, rel=1e-6)
    if happened < count < 1000:
        assert at_most(happened, count, high) == pytest.approx(0.05, rel=1e-6)
    assert low <= happened / count <= high
    assert high - low < 0.03 or count < 4096
    assert (low == 0.0) == (happened == 0)
    assert (high == 1.0) == (happened == count)


def test_the_interval_of_a_median_counts_values_on_either_side():
    values = [7.0, 1.0, 5.0, 2.0, 8.0, 3.0, 6.0, 4.0]
    assert median_interval(values) == (2.0, 7.0)  # one of eight values below the median or none: 9/256
    assert median_interval(values, risk=0.03) == (1.0, 8.0)
    assert median_interval(values[:4]) == (-math.inf, math.inf)


def test_how_many_networks_prove_a_share():
    assert count_for_proof(0.01) == 299
    for share in (0.3, 0.05, 0.001):
        count = count_for_proof(share)
        assert exact_interval(0, count)[1] < share <= exact_interval(0, count - 1)[1]


@pytest.mark.parametrize("last", range(-1, len(GRID)))
def test_the_search_finds_every_boundary_with_few_tries(last: int):
    tried: list[float] = []

    def is_safe(gamma: float) -> bool:
        tried.append(gamma)
        return last >= 0 and gamma <= GRID[last]

    assert find_boundary(is_safe, GRID) == last
    assert len(tried) == len(set(tried)) <= 7


def test_the_proof_goes_down_from_the_best_candidate_and_up_to_the_last_safe_place():
    grid = [0.1, 0.2, 0.3, 0.4]
    verdicts = {0.5: "safe safe unsafe unsafe", 1.0: "safe safe safe unsafe", 2.0: "safe open open unsafe"}

    def look_up(tau0: float, gamma: float) -> str:
        return verdicts[tau0].split()[grid.index(gamma)]

    found = {0.5: {"network": 0}, 1.0: {"network": 0}, 2.0: {"network": 3}}
    assert prove(look_up, look_up, found, grid) == 0.5  # the best candidate fell to 0.1; of equals the smallest tau0 is looked at first
    assert (found[0.5]["network"], found[2.0]["network"]) == (1, 0)
    found = {0.5: {"network": 3}, 1.0: {"network": 2}}
    assert prove(look_up, look_up, found, grid) == 1.0
    assert found == {0.5: {"network": 1}, 1.0: {"network": 2}}
    assert prove(lambda tau0, gamma: "unsafe", look_up, found, grid) == 0.5
    assert found[0.5]["network"] == -1
    found = {1.0: {"network": 1}}
    assert prove(lambda tau0, gamma: "safe", lambda tau0, gamma: "safe", found, grid) == 1.0
    assert found[1.0]["network"] == 3  # the last place of the grid


@pytest.fixture
def failing(monkeypatch) -> list[int]:
    """Networks are not simulated. Those with these numbers fail, counted over all rounds; each stage begins anew."""
    wrong: list[int] = []

    def simulate(self: Ledger, place: Place, samples: int, seed: int) -> Trajectory:
        record = self.records[place]
        V = torch.eye(3, dtype=torch.float64).repeat(samples, 1, 1)
        for number in range(samples):
            if record.stage != "search" and record.count + number in wrong:
                V[number] *= 1e4
        return Trajectory(torch.zeros(1), V[None], torch.full((samples,), math.inf))

    monkeypatch.setattr(Ledger, "simulate", simulate)
    return wrong


@pytest.mark.parametrize(
    ("wrong", "samples", "counted", "verdict"),
    [
        ([], 299, (0, 299), "safe"),
        ([100, 101, 102], 299, (1, 101), "open"),
        ([1], 299, (1, 2), "unsafe"),
        ([5, 998], 1000, (2, 1000), "safe"),
    ],
)
def test_a_proof_has_fresh_networks_and_ends_at_the_failure_that_denies_it(failing: list[int], wrong, samples, counted, verdict):
    failing += wrong
    ledger, place, trial = Ledger(Question(16, 8, 3, 2), seed=0), Place("network", 0.1, 1.0), Trial(0.01, samples)
    assert ledger.search(place, 8).count == 8
    assert trial.prove(ledger, 1.0, 0.1) == verdict
    row = ledger.row(place)
    assert (row.failed, row.count) == counted  # without the networks of the search
    assert exact_interval(trial.enough - 1, samples)[1] < 0.01 <= exact_interval(trial.enough, samples)[1]


@pytest.mark.parametrize(("wrong", "counted", "verdict"), [([0, 40, 60, 61], (3, 61), "unsafe"), ([0, 40], (2, 74), "open")])
def test_a_refutation_ends_at_the_failure_that_proves_it_and_is_not_repeated(failing: list[int], wrong, counted, verdict):
    failing += wrong
    ledger, trial = Ledger(Question(16, 8, 3, 2), seed=0), Trial(0.01, 299)
    assert [trial.refute(ledger, 1.0, 0.1) for _ in range(2)] == [verdict] * 2
    row = ledger.row(Place("network", 0.1, 1.0))
    assert (row.failed, row.count) == counted


def test_what_is_known_to_be_unsafe_is_not_simulated_again(failing: list[int]):
    failing += [0, 1, 2]
    drawn: list[Row] = []
    ledger, trial = Ledger(Question(16, 8, 3, 2), seed=0, tell=drawn.append), Trial(0.01, 299)
    assert trial.prove(ledger, 1.0, 0.1) == "unsafe"
    assert trial.refute(ledger, 1.0, 0.1) == "unsafe"
    assert len(drawn) == 1
    assert [trial.refute(ledger, 1.0, 0.2) for _ in range(2)] == ["unsafe"] * 2
    assert len(drawn) == 2
    failing.clear()
    assert trial.prove(ledger, 1.0, 0.3) == "safe"
    assert trial.refute(ledger, 1.0, 0.3) == "open"  # fewer networks
    assert len(drawn) == 4


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_the_risk_of_a_wrong_verdict_is_at_most_five_percent(share: float):
    """Exactly: a place with just this share is called safe if few of a proof fail, and unsafe if many of a refutation do."""
    for samples in (count_for_proof(share), 2 * count_for_proof(share)):
        trial = Trial(share, samples)
        assert at_most(trial.enough - 1, samples, share) <= 0.05
        assert 1 - at_most(trial.many - 1, trial.fewer, share) <= 0.05


def test_every_stage_draws_other_networks():
    ledger, place = Ledger(Question(16, 8, 3, 2), seed=0), Place("network", 0.1, 1.0)
    seeds = {ledger.choose_seed(place, stage, number) for stage in STAGES for number in (0, 8)}
    assert len(seeds) == 2 * len(STAGES)


def test_tokens_that_point_back_are_aligned_and_longer_streams_explode():
    X = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    assert mean_absolute_correlation(X @ X.T).item() == pytest.approx(1.0)
    mixed = torch.tensor([[1.0, -0.5, 0.2], [-0.5, 1.0, 0.1], [0.2, 0.1, 1.0]], dtype=torch.float64)
    assert mean_absolute_correlation(mixed).item() == pytest.approx(0.8 / 3)
    asked = Question(16, 8, 3, 2, correlation=0.9, growth=2.0)
    lengths = [1.0, 3.9, 4.1, 1.0, 1.1, 1e-9, 1e-9]  # squared
    V = torch.stack([length * torch.eye(3, dtype=torch.float64) for length in lengths])
    V[3], V[6] = shaped.equicorrelated(3, 0.91), 1e-9 * shaped.equicorrelated(3, 0.91)
    before = torch.eye(3, dtype=torch.float64).repeat(7, 1, 1)
    stopped = torch.tensor([math.inf] * 4 + [0.3] * 3, dtype=torch.float64)  # the last three left the range of floats
    paths = Trajectory(torch.arange(2), torch.stack((before, V)), stopped)
    judged = asked.judge(paths)
    aligned, exploded = judged.failed.T.tolist()
    assert aligned == [False, False, False, True, False, False, True]
    assert exploded == [False, False, True, False, True, False, False]
    assert judged.correlation[3].item() == pytest.approx(0.91)
    assert judged.growth[2].item() == pytest.approx(4.1**0.5)
    assert asked.judge(paths, may_grow=True).failed[:, 1].tolist() == [False] * 4 + [True] + [False] * 2


def test_a_path_of_the_limit_that_explodes_in_its_first_step_is_counted():
    """It is shown at its start: no state after it is within the range of floats."""
    ledger = Ledger(Question(64, 32, 4, 2), seed=0)
    row = ledger.search(Place("limit", 0.7, 0.01), 16)
    assert row.growth == pytest.approx(1.0)
    assert row.exploded == 16


def test_a_pre_ln_stream_is_measured_at_the_last_layer_and_may_grow():
    """Each of 2 branches a layer adds about 1 to the mean squared length."""
    ledger = Ledger(Question(16, 40, 3, 2, growth=2.0), seed=0)
    row = ledger.search(Place("Pre-LN", 0.5, 1.0), 16)
    assert row.growth == pytest.approx(math.sqrt(1 + 2 * 40), rel=0.25)
    assert row.exploded == 0


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_blocks_are_those_of_the_models(qk_norm: bool):
    """The feed-forward layer is the one that `predict` reads from the model, and the logits have the model's scale."""
    config = ShapedConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, gamma=0.3, tau0=0.4, c_minus=-0.5, is_decoder=True, qk_norm=qk_norm
    )
    blocks = describe_network(config, 3).blocks
    asked = Question(16, 3, 3, 2, c_minus=-0.5, qk_norm=qk_norm)
    attention, feedforward = asked.network(0.3, 0.4).layers
    assert len(blocks) == 3
    assert feedforward == blocks[0][1]
    ((branch, _),) = blocks[0][0].pairs
    assert isinstance(branch, AttentionBranch)
    assert isinstance(attention, shaped.ShapedAttention)
    assert branch.scale is not None
    size = 1.0 if qk_norm else branch.query.std * branch.key.std * 16
    assert branch.scale * size == pytest.approx(1 / attention.tau(16, 8))
    assert (blocks[0][0].lam, blocks[0][0].gamma) == pytest.approx((attention.shortcut, attention.gamma))
    assert (branch.heads, branch.mask, attention.project) == (attention.heads, attention.mask, True)


def test_networks_fail_as_often_as_the_modules():
    """Length and correlation of decoders with explicit weights, and of what the ledger simulates."""
    asked = Question(n=16, d=6, m=3, heads=2)
    ledger = Ledger(asked, seed=5)
    place = Place("network", 0.6, 0.3)
    ledger.search(place, 1024)
    record = ledger.records[place]
    torch.manual_seed(3)
    X = 4.0 * torch.linalg.qr(torch.randn(16, 3)).Q.T  # orthonormal rows times sqrt(n)
    X = torch.linalg.cholesky(asked.start().float()) @ X
    with torch.no_grad():
        Y = torch.stack([ShapedDecoder(6, 16, 2, gamma=0.6, tau0=0.3)(X) for _ in range(150)]).double()
    V = Y @ Y.mT / 16
    made = mean_absolute_correlation(shaped.correlation(V)), V.diagonal(dim1=-2, dim2=-1).mean(-1).sqrt().log()
    drawn = torch.cat(record.correlation), torch.cat(record.growth).log()
    for one, other in zip(made, drawn, strict=True):
        error = (one.var() / len(one) + other.var() / len(other)).sqrt()
        assert abs(one.mean() - other.mean()) < 5 * error
        assert error < 0.08


def test_a_mask_that_shows_later_tokens_alone_has_no_gradients(monkeypatch):
    """They are measured on the first tokens, which this mask leaves nothing to attend to."""
    monkeypatch.setattr("shaped.advice.measurement.GRADIENT_TOKENS", 2)
    mask = torch.zeros(4, 4)
    mask[:, :3] = -torch.inf
    ledger = Ledger(Question(16, 8, 4, 2, mask=mask), seed=2**64)
    place = Place("network", 0.1, 1.0)
    ledger.search(place, 40)
    assert ledger.backpropagate(place).gradient is None
    assert Question(16, 8, 4, 2, mask="causal").lets_attend(2)


def test_gradients_are_those_of_the_first_tokens_over_those_of_the_last(monkeypatch):
    tokens = torch.tensor([[8.0, 9.0, 3.0], [100.0, 100.0, 100.0], [2.0, 3.0, torch.nan]])
    monkeypatch.setattr("shaped.advice.measurement.backpropagate", lambda *_, **__: SimpleNamespace(tokens=tokens))
    ledger, place = Ledger(Question(16, 2, 3, 2), seed=0), Place("network", 0.1, 1.0)
    ledger.search(place, 4)
    assert ledger.backpropagate(place).gradient == GradientSpread(3.5, median_interval([4.0, 3.0]), 2, 3)


def test_the_usual_temperatures_are_between_the_standard_one_and_the_paper_s():
    assert check_temperatures(None, 16) == (0.25, 0.5, 1.0)


def test_a_mask_may_differ_between_heads():
    mask = Question(16, 8, 3, 2, mask=torch.zeros(2, 3, 3)).attention(0.1, 1.0, m=2).mask
    assert isinstance(mask, torch.Tensor)
    assert mask.shape == (2, 2, 2)
    with refused("mask must", "(2, 4, 4)"):
        Question(16, 8, 3, 2, mask=torch.zeros(2, 4, 4))


def test_a_whole_search_is_the_same_on_an_executor():
    rows: list[Row] = []
    advice = shaped.advise(**SMALL, tau0=(0.2, 1.0), gammas=(0.05, 0.7), growth=1.5, seed=1, tell=rows.append)
    with ThreadPoolExecutor(2) as executor:
        other = shaped.advise(**SMALL, tau0=(0.2, 1.0), gammas=(0.05, 0.7), growth=1.5, seed=1, executor=executor)
    text, also = (json.dumps(one.to_dict() | {"info": None}, allow_nan=False) for one in (advice, other))
    assert text == also
    assert advice.best is not None
    assert advice.best in advice.rows
    assert advice.best.verdict(0.2) == "safe"
    assert advice.best.count >= count_for_proof(0.2) == 14
    assert advice.best.gradient is not None
    assert {row.law for row in advice.compared} == {"unshaped", "Pre-LN", "Post-LN"}
    assert {(one.law, one.tau0) for one in advice.boundaries} == {(law, t) for law in ("network", "limit") for t in (0.2, 1.0)}
    assert {(row.law, row.gamma, row.tau0) for row in advice.rows} <= {(row.law, row.gamma, row.tau0) for row in rows}
    assert advice.sentence in str(advice)


def make_row(**values: Any) -> Row:
    usual: dict[str, Any] = {"count": 299, "aligned": 0, "exploded": 0, "correlation": 0.3, "growth": 1.0}
    return Row(**({"law": "network", "gamma": 0.25, "tau0": 1.0} | usual | values))


@pytest.mark.parametrize(
    ("below", "above", "unsafe", "proved", "words"),
    [
        ({}, {"exploded": 20}, True, True, ("proved to be safe is 0.25", "The next, 0.3", "it is unsafe.")),
        ({}, {"exploded": 3}, False, False, ("do not prove what it is", "none is proved to be unsafe")),
        ({}, None, False, True, ("proved to be safe is 0.25", "the largest that was tried")),
        (None, {"aligned": 200}, True, True, ("No gamma is safe: even 0.3", "66.9 % (62.1 to 71.4)")),
        (None, {"aligned": 3}, False, False, ("No gamma is safe", "these samples do not prove it")),
    ],
)
def test_the_answer_says_what_is_proved(below: Any, above: Any, unsafe: bool, proved: bool, words: tuple[str, ...]):
    safe = None if below is None else make_row(**below, gradient=GradientSpread(2.0, (1.0, math.inf), 8, 3))
    higher = None if above is None else make_row(gamma=0.3, **above)
    answer = Boundary("network", 1.0, safe, higher, higher if unsafe else None)
    rows = [row for row in (safe, higher) if row is not None]
    rows.append(make_row(law="limit"))
    advice = Advice(Question(16, 8, 3, 2), [answer, replace(answer, law="limit", below=rows[-1], above=None)], rows, [], answer)
    assert advice.proved == proved
    assert advice.best is safe
    assert all(word in advice.sentence for word in words)
    json.dumps(advice.to_dict(), allow_nan=False)
    assert "The answer rests on" not in str(advice)
    counted = str(replace(advice, info={"verdicts": 3}))
    assert "rests on 3 verdicts, of proofs and refutations: that none is wrong holds with 85 %" in counted
    shown = advice.draw()
    assert len(shown.axes) == 2


def test_the_picture_shows_boundaries_verdicts_and_shares():
    asked = Question(16, 8, 3, 2)
    safe, unsafe = make_row(), make_row(gamma=0.5, exploded=30)
    passes, fails = make_row(law="limit", gamma=0.1, count=32), make_row(law="limit", gamma=0.25, count=32, aligned=8)
    other = make_row(tau0=0.1, gamma=0.1, count=8, exploded=8)
    answer = Boundary("network", 1.0, safe, unsafe, unsafe)
    boundaries = [Boundary("network", 0.1, None, other, other), Boundary("limit", 0.1, passes, None, None)]
    boundaries += [answer, Boundary("limit", 1.0, passes, fails, fails)]
    advice = Advice(asked, boundaries, [safe, unsafe, passes, fails, other, replace(passes, tau0=0.1)], [], answer)
    places, shares = advice.draw().axes
    lines = {str(line.get_label()): (np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()) for line in places.lines}
    floor = 0.1 / 1.2  # where no gamma is good
    assert lines["largest good gamma, networks"] == ([0.1, 1.0], [pytest.approx(floor), 0.25])
    assert lines["largest good gamma, limit (SDE)"] == ([0.1, 1.0], [0.1, 0.1])
    marks: dict[str, Any] = {str(mark.get_label()): mark for mark in places.collections}
    offsets = {name: marks[name].get_offsets().tolist() for name in ("networks: safe", "networks: unsafe", "answer")}
    assert offsets == {"networks: safe": [[1.0, 0.25]], "networks: unsafe": [[1.0, 0.5], [0.1, 0.1]], "answer": [[1.0, 0.25]]}
    drawn: dict[str, Any] = {str(bars.get_label()): bars[0] for bars in shares.containers}
    assert drawn.keys() == {f"{law}, tau0 = {tau0}" for law in ("networks", "limit (SDE)") for tau0 in ("0.1", "1")}
    assert list(drawn["networks, tau0 = 1"].get_ydata()) == pytest.approx([3e-4, 30 / 299])  # a share of 0 is at the bottom
    assert list(drawn["limit (SDE), tau0 = 1"].get_ydata()) == pytest.approx([3e-4, 0.25])
    assert list(drawn["networks, tau0 = 1"].get_xdata()) == pytest.approx([0.25, 0.5], rel=0.05)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"n": 2}, ("n must", "3", "got 2")),
        ({"m": 1}, ("m must", "got 1")),
        ({"d": 0}, ("d must", "got 0")),
        ({"heads": 3}, ("heads must divide", "16", "got 3")),
        ({"mask": "triangular"}, ("mask must", "triangular")),
        ({"mask": torch.zeros(4, 4)}, ("mask must", "3", "(4, 4)")),
        ({"qk_norm": 1}, ("qk_norm must", "got 1")),
        ({"hidden": 0}, ("hidden must", "got 0")),
        ({"correlation": 0.1}, ("correlation must", "0.2", "got 0.1")),
        ({"correlation": 1.0}, ("correlation must", "got 1")),
        ({"growth": 1.0}, ("growth must", "got 1")),
        ({"growth": 1e5}, ("growth must", "10000", "got 100000")),
        ({"share": 0.0}, ("share must", "got 0")),
        ({"share": 0.7}, ("share must", "got 0.7")),
        ({"samples": 5}, ("samples must", "14", "got 5")),
        ({"tau0": "1"}, ("tau0 must", "'1'")),
        ({"tau0": ()}, ("tau0 must", "got 0")),
        ({"tau0": (1.0, -1.0)}, ("tau0 must", "got -1")),
        ({"gammas": (0.3, 0.2)}, ("gammas must", "[0.3, 0.2]")),
        ({"gammas": (0.3, 1.2)}, ("gammas must", "got 1.2")),
        ({"seed": -1}, ("seed must", "got -1")),
        ({"rope": -2.0}, ("rope must", "-2")),
        ({"rope": (0.1, 0.2, 0.3)}, ("n_k must", "6", "got 8")),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], words: tuple[str, ...]):
    with refused(*words):
        shaped.advise(**SMALL | wrong)


def test_an_answer_is_json_whatever_numbers_were_asked_with():
    asked: dict[str, Any] = {name: np.int64(value) for name, value in SMALL.items() if name != "share"}
    asked |= {"share": np.float64(0.2), "rho": torch.tensor(0.2), "qk_norm": np.True_, "rope": np.array([1.0, 0.5, 0.25, 0.125])}
    asked |= {"tau0": np.array(0.25), "gammas": np.array([0.5, 1.0]), "samples": np.int64(16), "seed": np.int64(1)}
    said = shaped.advise(**asked)
    question = json.loads(json.dumps(said.to_dict()))["question"]
    assert question == SMALL | {
        "hidden": 64,
        "c_minus": -1.0,
        "rho": pytest.approx(0.2),
        "qk_norm": True,
        "rope": [1.0, 0.5, 0.25, 0.125],
    } | {name: question[name] for name in ("correlation", "growth", "mask")}
