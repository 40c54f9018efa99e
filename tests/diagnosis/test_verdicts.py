"""The rules, the risk, bands, fresh copies, and what is saved."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_models import WIDTH, Attributes, ListOfLists
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

import shaped
from refusals import refused
from shaped.diagnosis import Diagnosis
from shaped.diagnosis.bands import Bands
from shaped.diagnosis.observation import LayerObservation, Observation, StackObservation
from shaped.diagnosis.one_pass.quantities import AttentionQuantities, TokenQuantities
from shaped.diagnosis.page import render_page
from shaped.diagnosis.reinitialised import draw_weights, make_fresh_copy
from shaped.diagnosis.verdicts import RULES, Finding, Verdicts, judge, measure_risk
from shaped.testing.stats import generator

HEALTHY = TokenQuantities(0.1, 7.0, 1.0, 1.1, 8)
CALL = AttentionQuantities((1.5,), (2.0,), (1.0,))
X = torch.randn(2, 5, WIDTH, generator=generator(31))


def make_observation(depth: int = 4, **changes: Any) -> Observation:
    """A healthy stack, with the last layer changed."""
    layers = [LayerObservation(f"layers.{i}", HEALTHY, {"attn": CALL}, {"weight": 1.0}, 0.0) for i in range(depth)]
    layers[-1] = replace(layers[-1], **changes)
    return Observation((StackObservation("layers", replace(HEALTHY, correlation=0.0), tuple(layers)),), 1.0, "a loss", "")


def find(name: str, observation: Observation) -> Finding:
    return next(finding for finding in judge(observation) if name in finding.name)


@pytest.mark.parametrize(
    ("name", "decades", "changes"),
    [
        ("rank collapse", 0.0, {"tokens": replace(HEALTHY, correlation=0.95)}),
        ("rank collapse", 1.0, {"tokens": replace(HEALTHY, correlation=0.995)}),
        ("rank collapse", -1.0, {"tokens": replace(HEALTHY, correlation=0.5)}),
        ("entropy collapse", 1.0, {"attention": {"attn": replace(CALL, entropy=(0.01,))}}),
        ("entropy collapse", -1.0, {"attention": {"attn": replace(CALL, entropy=(1.0,))}}),
        ("uniform attention", 1.0, {"attention": {"attn": replace(CALL, entropy=(2.0 * (1.0 - 1e-6),))}}),
        ("bounded attention", 0.0, {"attention": {"attn": replace(CALL, largest_share=0.5)}}),
        ("bounded attention", math.log10(9.0), {"attention": {"attn": CALL, "cross": replace(CALL, largest_share=0.1)}}),
        ("bounded attention", -math.log10(9.0), {"attention": {"attn": replace(CALL, largest_share=0.9)}}),
        ("exploding gradients", 1.0, {"gradients": {"weight": 1e-3}}),
        ("vanishing gradients", 2.0, {"gradients": {"weight": 1e4}}),
        ("vanishing gradients", -1.0, {"gradients": {"first": 6.0, "second": 8.0}}),
        ("growing residual stream", 1.0, {"tokens": replace(HEALTHY, length=100.0)}),
        ("shrinking residual stream", 1.0, {"tokens": replace(HEALTHY, length=0.01)}),
        ("dead units", 0.0, {"dead": 0.5}),
        ("dead units", math.log10(9.0), {"dead": 0.9}),
    ],
)
def test_rules_say_how_far_a_value_is_beyond_its_threshold(name: str, decades: float, changes: dict[str, Any]):
    finding = find(name, make_observation(**changes))
    assert finding.decades == pytest.approx(decades, abs=1e-3)
    assert "layers.3" in finding.layers or decades < 0.0
    assert (finding.threshold, finding.source) == (RULES[finding.name].threshold, RULES[finding.name].source)
    assert "threshold" in str(finding)


def make_stack(entering: TokenQuantities = HEALTHY, **of_layers: list[Any]) -> Observation:
    """Layers that differ: of each quantity one value a layer."""
    layers = [
        LayerObservation(f"layers.{i}", HEALTHY, {"attn": CALL}, {"weight": 1.0}, 0.0) for i in range(len(next(iter(of_layers.values()))))
    ]
    for name, values in of_layers.items():
        layers = [replace(layer, **{name: value}) for layer, value in zip(layers, values, strict=True)]
    return Observation((StackObservation("layers", entering, tuple(layers)),), 1.0, "a loss", "")


def make_tokens(name: str, values: list[float]) -> list[TokenQuantities]:
    return [replace(HEALTHY, **{name: value}) for value in values]


def test_rank_collapse_is_where_tokens_are_more_alike_behind_the_stack_than_before_it():
    def find_layers(entering: float, *rho: float) -> list[tuple[str, ...]]:
        seen = make_stack(replace(HEALTHY, correlation=entering), tokens=make_tokens("correlation", list(rho)))
        return [finding.layers for finding in judge(seen) if finding.name == "rank collapse"]

    assert find_layers(0.1, 0.97, 0.95, 0.94, 0.96) == [("layers.0", "layers.1", "layers.3")]
    assert find_layers(0.1, 0.2, 0.3) == [("layers.1",)]  # the nearest
    assert find_layers(0.96, 0.97, 0.96) == find_layers(0.97, 0.99, 0.96) == find_layers(0.1, 0.99, math.nan) == []


@pytest.mark.parametrize(
    ("lengths", "decades"),
    [((1.0, 9.0, 0.5, 5.0, 5.0), 0.0), ((1.0, 5.0, 2.0, 7.0, 200.0), 1.0), ((1.0, 5.0, 2.0, 7.0, 0.2), 0.0)],
)
def test_a_stream_is_compared_over_its_second_half(lengths: tuple[float, ...], decades: float):
    """From behind the second of four layers to behind the last."""
    entering, *behind = make_tokens("length", list(lengths))
    (finding,) = [one for one in judge(make_stack(entering, tokens=behind)) if "stream" in one.name]
    assert finding.value == pytest.approx(lengths[4] / lengths[2])
    assert finding.decades == pytest.approx(decades, abs=1e-9)
    assert finding.name.startswith("growing" if lengths[4] > lengths[2] else "shrinking")


@pytest.mark.parametrize("lengths", [(math.nan, 1.0), (1.0, math.inf), (0.0, 0.0)])
def test_a_stream_without_a_length_is_not_judged(lengths: tuple[float, float]):
    middle, last = make_tokens("length", list(lengths))
    assert not any("stream" in finding.name for finding in judge(make_stack(tokens=[HEALTHY, middle, HEALTHY, last])))


def test_gradients_of_two_layers_are_compared_and_one_is_not():
    (two,) = [one for one in judge(make_stack(gradients=[{"weight": 1e-3}, {"weight": 1.0}])) if "gradients" in one.name]
    assert (two.name, two.layers, two.decades) == ("vanishing gradients", ("layers.0", "layers.1"), pytest.approx(1.0))
    known = judge(make_stack(gradients=[{"weight": 1e-3}, {}, {"weight": math.nan}]))
    assert not any("gradients" in one.name for one in known)


def test_every_layer_at_a_threshold_is_named_and_no_number_is_beyond_rounding():
    (units,) = [one for one in judge(make_stack(dead=[0.5, 0.1, 0.5, 0.49])) if one.name == "dead units"]
    assert (units.layers, units.decades) == (("layers.0", "layers.2"), 0.0)
    assert find("dead units", make_stack(dead=[0.1, 1.0])).decades == 6.0
    assert find("dead units", make_stack(dead=[0.0, 0.0])).decades == -6.0
    worst = replace(make_stack(dead=[1.0]), non_finite="the loss")
    assert [finding.name for finding in judge(worst) if finding.decades == 6.0] == ["non-finite values", "dead units"]


def test_a_stack_without_gradients_is_told():
    seen = make_observation(depth=1, gradients={"weight": 0.0})
    (notice,) = Verdicts(finding for finding in judge(seen) if finding.at_risk)
    assert (notice.name, notice.layers) == ("no gradients", ("layers.0",))
    assert measure_risk(judge(seen)) < 0.3
    found = Diagnosis(seen, Bands({}, ""), judge(seen))
    assert "no gradients" in repr(found)
    assert "every gradient is 0 in layers.0" in render_page(found.to_json())
    for gradients in ({"weight": 1e-30}, {}):
        assert not any(finding.name == "no gradients" for finding in judge(make_observation(depth=1, gradients=gradients)))


def test_risk_grows_with_every_excess_and_is_that_of_the_worst_stack():
    risks = [measure_risk(judge(make_observation(tokens=replace(HEALTHY, correlation=rho)))) for rho in (0.1, 0.5, 0.9, 0.96, 0.999)]
    assert risks == sorted(risks)
    assert risks[0] < 0.3 < 0.5 < risks[3]
    both = judge(make_observation(tokens=replace(HEALTHY, correlation=0.96), gradients={"weight": 1e-3}))
    assert risks[3] < measure_risk(both) < 1.0
    finding = both[0]
    assert measure_risk([finding]) == measure_risk([finding, replace(finding, stack="other")]) == pytest.approx(10.0 / 11.0, rel=1e-3)
    uniform = judge(make_observation(attention={"attn": replace(CALL, entropy=(2.0,))}))
    assert uniform[0].name == "uniform attention"
    assert measure_risk(uniform) < 0.3
    bounded = judge(make_observation(attention={"attn": replace(CALL, largest_share=0.1)}))
    assert (bounded[0].name, measure_risk(bounded)) == ("bounded attention", measure_risk(judge(make_observation())))
    assert not any(finding.name == "bounded attention" for finding in judge(make_observation()))
    assert measure_risk(()) == 0.0


def test_a_risk_without_a_verdict_is_explained():
    near = make_observation(tokens=replace(HEALTHY, correlation=0.92), dead=0.45)
    found = Diagnosis(near, Bands({}, ""), judge(near))
    assert found.risk >= 0.5
    assert not found.verdicts
    assert "the odds add up (1 at a threshold): dead units 0.82, rank collapse 0.63" in found.remark
    assert "several thresholds are near" in repr(found)
    page = render_page(found.to_json())
    assert "the odds add up" in page
    assert "No rule found a risk" not in page
    for other in (make_observation(), make_observation(dead=0.6)):
        assert not Diagnosis(other, Bands({}, ""), judge(other)).remark


def test_values_that_are_not_finite_are_a_verdict():
    torch.manual_seed(5)
    model = ListOfLists()
    with torch.no_grad():
        model.layers[1][0].qkv.weight[0, 0] = torch.nan  # pyright: ignore
    found = shaped.diagnose(model, X, seeds=0)
    assert "parameter layers.1.0.qkv.weight" in str(found.verdicts)
    assert found.verdicts[0].name == "non-finite values"
    assert found.risk > 0.99
    with torch.no_grad():
        model.layers[1][0].qkv.weight[0, 0] = 0.0  # pyright: ignore
        model.layers[1][0].out.weight.fill_(1e38)  # pyright: ignore
    assert "tokens behind layer layers.1" in str(shaped.diagnose(model, X, seeds=0).verdicts)


def test_a_deep_stack_without_residual_branches_collapses():
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.layer_norm(self.attention(x, x, x)[0], (WIDTH,))

    torch.manual_seed(6)
    found = shaped.diagnose(nn.Sequential(*(Averaging() for _ in range(6))), X, seeds=2)
    assert "rank collapse" in str(found.verdicts)
    assert found.risk > 0.5
    assert found.bands.source == "2 copies with fresh weights, drawn by each module's reset_parameters"
    band = found.bands.stacks[""]["correlation"]
    assert len(band.mean) == 7
    assert all(low <= mean <= high for low, mean, high in zip(band.low, band.mean, band.high, strict=True))
    assert band.low[-1] > 0.95


def test_fresh_copies_have_the_law_of_the_model():
    torch.manual_seed(7)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=40, n_positions=8, bos_token_id=None, eos_token_id=None)
    model: Any = AutoModelForCausalLM.from_config(config)
    before = model.transformer.h[0].mlp.c_proj.weight.clone()
    one, again, other = (make_fresh_copy(model, seed).get_parameter("transformer.h.0.mlp.c_proj.weight").detach() for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    drawn = make_fresh_copy(model, 0)
    draw_weights(drawn, 1)
    assert torch.equal(drawn.get_parameter("transformer.h.0.mlp.c_proj.weight"), other)
    assert torch.equal(model.transformer.h[0].mlp.c_proj.weight, before)
    for copied in (one, other):  # the residual branches' last matrices are divided by sqrt(2 · depth)
        assert float(copied.std()) == pytest.approx(0.02 / 2.0, abs=5 * 0.01 / (2 * copied.numel()) ** 0.5)
    encoder = shaped.nn.ShapedEncoder(2, WIDTH, 2, gamma=0.3)
    query = "blocks.0.attention.query.weight"
    expected = float(torch.stack([encoder.get_parameter(f"blocks.{i}.attention.query.weight").detach() for i in (0, 1)]).std())
    assert float(make_fresh_copy(encoder, 0).get_parameter(query).detach().std()) == pytest.approx(expected, rel=5 * (1 / 256) ** 0.5)

    class WithParameter(Attributes):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.zeros(3))

    with refused("reset_parameters", "WithParameter"):
        make_fresh_copy(WithParameter(), 0)
    assert "no band" in shaped.diagnose(WithParameter(), X).bands.source
    uncopiable = Attributes()
    uncopiable.kept = uncopiable.first.query.weight * 2
    with refused("copy.deepcopy", "Attributes"):
        make_fresh_copy(uncopiable, 0)


def test_bands_of_a_known_family_are_predicted():
    torch.manual_seed(8)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=40, n_positions=8, bos_token_id=None, eos_token_id=None)
    ids = torch.randint(0, 40, (1, 8), generator=generator(32))
    model = AutoModelForCausalLM.from_config(config)
    found = shaped.diagnose(model, {"input_ids": ids, "labels": ids}, seeds=8)
    assert "predicted" in found.bands.source
    assert found.bands.stacks["transformer.h"].keys() == {"correlation", "rank", "length", "entropy"}
    length = found.bands.stacks["transformer.h"]["length"]
    assert length.low[-1] * 0.98 < found.layers[-1]["length"] < length.high[-1] * 1.02


def test_what_is_saved_is_json_without_nan(tmp_path):
    torch.manual_seed(9)
    found = shaped.diagnose(Attributes(), X, seeds=1)
    path, page = found.save(tmp_path / "out")
    assert page.name == "diagnosis.html"
    read = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert read["risk"] == found.risk
    assert [row["name"] for row in read["layers"]] == ["first", "second"]
    assert len(read["layers"][0]["heads"]["Block"]["entropy"]) == 1
    assert len(read["stacks"][""]["curves"]["correlation"]) == 3
    assert repr(found).startswith("Diagnosis(Attributes, 2 layers, risk 0.")
    with refused("seeds", "at least 0", "-1"):
        shaped.diagnose(Attributes(), X, seeds=-1)


def test_the_document_has_the_table_of_the_rules():
    lines = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text(encoding="utf-8").partition("\n## The rules\n")[2].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[3 : lines.index("", 3)]]
    for name, rule in RULES.items():
        threshold = {"uniform attention": "10⁻⁵", "non-finite values": ""}.get(name, f"{rule.threshold:g}")
        authors = rule.source.partition(" et al.")[0] if "et al." in rule.source else ""
        matching = [row for row in rows if set(name.split()) <= set(row[0].split())]
        assert [(row[2], authors in row[3], "does not count" not in row[3]) for row in matching] == [(threshold, True, rule.counts)], name
    assert RULES["uniform attention"].threshold == 1.0 - 1e-5
