"""The rules, the risk, bands, fresh copies, and what is saved."""

import json
import math
from dataclasses import replace
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
from shaped.diagnosis.page import document, render_page
from shaped.diagnosis.reinitialised import draw_weights, make_fresh_copy
from shaped.diagnosis.remedies.table import REMEDIES
from shaped.diagnosis.remedies.trials import QUANTITIES
from shaped.diagnosis.verdicts import NOTICES, Finding, Verdicts, judge, measure_risk
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
    assert finding.source
    assert "threshold" in str(finding)
    assert all(finding.name in table for table in (REMEDIES, QUANTITIES, document.RULES))


def test_a_stack_without_gradients_is_told():
    seen = make_observation(depth=1, gradients={"weight": 0.0})
    (notice,) = Verdicts(finding for finding in judge(seen) if finding.at_risk)
    assert (notice.name, notice.layers) == ("no gradients", ("layers.0",))
    assert measure_risk(judge(seen)) < 0.3
    assert all(notice.name in table for table in (REMEDIES, QUANTITIES, document.RULES, NOTICES))
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
