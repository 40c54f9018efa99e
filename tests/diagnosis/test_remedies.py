"""Remedies: each change of a call against the formula or against changed weights, and what is tried and told."""

import copy
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from plain_models import HEADS, WIDTH, Attributes, ListOfLists
from stock import bert, gpt2, llama, made, t5  # pyright: ignore[reportMissingImports] (in tests/hf)
from test_interface import inputs, padding  # pyright: ignore[reportMissingImports] (in tests/hf)
from test_verdicts import CALL, HEALTHY, make_observation
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shaped
from shaped import hf
from shaped.commands.diagnose import describe_verdicts
from shaped.diagnosis import observe
from shaped.diagnosis.curves import list_curves
from shaped.diagnosis.remedies.branches import WeakenBranches
from shaped.diagnosis.remedies.changes import DivideLogits, LeakThroughReLU, NormaliseQueriesAndKeys, ShapeAttention
from shaped.diagnosis.remedies.table import REMEDIES, SHAPE, WEAKEN, Remedy, Variant
from shaped.diagnosis.remedies.trials import Attempt, choose_trial, compare, try_remedies
from shaped.diagnosis.verdicts import RULES, judge, show
from shaped.nn.functional import shaped_attention
from shaped.testing.stats import generator

Q, K, V = torch.randn(3, 2, HEADS, 5, 4, generator=generator(61), dtype=torch.float64)
X = torch.randn(2, 6, WIDTH, generator=generator(62), dtype=torch.float64)


def attend(fused: bool, causal: bool = False) -> Tensor:
    """Fused attention, or a softmax as models write it that compute it themselves."""
    if fused:
        return F.scaled_dot_product_attention(Q, K, V, is_causal=causal)
    scores = Q @ K.mT / 2
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), torch.finfo(scores.dtype).min) if causal else scores
    return torch.softmax(scores, dim=-1) @ V


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_attention_calls_are_changed(fused, causal):
    def change(mode) -> Tensor:
        with mode:
            result = attend(fused, causal)
        assert mode.applied == 1
        return result

    torch.testing.assert_close(change(ShapeAttention(0.3)), 0.3 * shaped_attention(Q, K, V, is_causal=causal))
    cooled = F.scaled_dot_product_attention(Q, K, V, scale=0.5 / 3.0, is_causal=causal)
    torch.testing.assert_close(change(DivideLogits(3.0)), cooled)
    if fused:
        q, k = (x / x.square().mean(-1, keepdim=True).sqrt() for x in (Q, K))
        normalised = F.scaled_dot_product_attention(q, k, V, is_causal=causal)
        torch.testing.assert_close(change(NormaliseQueriesAndKeys()), normalised, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("need_weights", [False, True])
def test_the_attention_within_multi_head_attention(need_weights):
    torch.manual_seed(63)
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    with ShapeAttention(0.4) as mode:
        changed = model(X, X, X, need_weights=need_weights)[0]
    q, k, v = (
        part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in F.linear(X, model.in_proj_weight, model.in_proj_bias).chunk(3, -1)
    )
    assert mode.applied == 1
    torch.testing.assert_close(changed, model.out_proj(0.4 * shaped_attention(q, k, v).transpose(1, 2).flatten(2)))


def test_what_is_no_self_attention_stays():
    with ShapeAttention(0.3) as mode:
        crossed = F.scaled_dot_product_attention(Q[..., :3, :], K, V)
        plain = torch.softmax(Q, -1)
    assert mode.applied == 0
    assert torch.equal(crossed, F.scaled_dot_product_attention(Q[..., :3, :], K, V))
    assert torch.equal(plain, Q.softmax(-1))


RELUS = [F.relu, torch.relu, Tensor.relu, nn.ReLU()]
IN_PLACE = [F.relu_, torch.relu_, Tensor.relu_, nn.ReLU(inplace=True)]


@pytest.mark.parametrize("relu", [*RELUS, *IN_PLACE])
def test_every_relu_leaks(relu):
    """In place where the model's own is: it may go on with the input."""
    x = X.clone()
    with LeakThroughReLU(0.1) as mode:
        result = relu(x)
    assert mode.applied == 1
    assert torch.equal(result, F.leaky_relu(X, 0.1))
    assert torch.equal(x, result if relu in IN_PLACE else X)


@pytest.mark.parametrize("relu", [F.relu, F.relu_, Tensor.relu_])
def test_dead_units_of_every_relu_are_revived(relu):
    class Call(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return relu(x)

    torch.manual_seed(70)
    model = ListOfLists(2)
    for _, feedforward in model.layers:  # pyright: ignore
        nn.init.constant_(feedforward.net[1].bias, -5.0)
        feedforward.net[2] = Call()
    found = shaped.diagnose(model, X.float(), seeds=0, remedies=True)
    outcomes = [trial.outcome for trial in found.remedies or () if trial.verdict == "dead units" and "ReLU" in trial.remedy]
    assert outcomes == ["removes the verdict"]


@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_shaping_a_call_is_what_shaping_the_model_does(make):
    """The code that is recommended has the numbers that were measured. One sequence has padding."""
    model: Any = made(make, "sdpa")
    batch = inputs(make.__name__, padding("right"))
    changed = observe(model, batch, change=ShapeAttention(0.3))
    shaped_model = observe(hf.shape(copy.deepcopy(model), gamma=0.3), batch)
    for one, other in zip(changed.stacks[0].layers, shaped_model.stacks[0].layers, strict=True):
        assert asdict(one.tokens) == pytest.approx(asdict(other.tokens), rel=1e-6)
        assert one.gradients == pytest.approx(other.gradients, rel=1e-5)
    plain = observe(model, batch)
    assert plain.stacks[0].layers[-1].tokens.length != pytest.approx(changed.stacks[0].layers[-1].tokens.length, rel=1e-6)


LAST = ("out_proj", "linear2", "c_proj", "o_proj", "down_proj", "attention.output.dense", "output.dense", "layers.0.0.out", "net.3")


@pytest.mark.parametrize("name", ["pre-ln", "post-ln", "gpt2", "llama", "bert", "t5", "list"])
def test_weaker_branches_are_weaker_last_weights(name):
    """Rotary embeddings, position biases and GELUs have sums too, which must stay."""
    torch.manual_seed(64)
    makes = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5}
    batch: Any = X
    if name in makes:
        model: Any = made(makes[name], "sdpa")
        batch, last = inputs(name), (*LAST, "SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")
    elif name == "list":
        model, last = ListOfLists(1).double(), LAST
    else:
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, batch_first=True, norm_first=name == "pre-ln", dtype=torch.float64)
        model, last = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), LAST
    changed, mode = observe(model, batch, change=(mode := WeakenBranches(0.3))), mode
    weaker = copy.deepcopy(model) if name != "list" else model
    parts = [part for place, part in weaker.named_modules() if place.endswith(last)]
    layers = sum(len(stack.layers) for stack in changed.stacks)
    assert mode.applied == len(parts) == (5 * layers // 2 if name == "t5" else 2 * layers)
    with torch.no_grad():
        for part in parts:
            part.weight.mul_(0.3)
            if getattr(part, "bias", None) is not None:
                part.bias.mul_(0.3)
    expected = observe(weaker, batch)
    for one, other in zip(changed.stacks, expected.stacks, strict=True):
        mine, theirs = list_curves(one), list_curves(other)
        for curve in ("correlation", "length", "rank", "entropy"):
            assert mine[curve] == pytest.approx(theirs[curve], rel=1e-6, nan_ok=True), curve


def test_sums_in_any_order_and_in_place():
    torch.manual_seed(68)
    one, other = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(2))
    with WeakenBranches(0.3) as mode, torch.no_grad():
        parallel = X + (one(X) + other(X))
        stream = X.clone()
        stream += one(stream)
        branch = one(X)
        branch += X
        gated = one(X) + X * other(X)
    assert mode.applied == 3  # two branches of one stream are not a branch of each other
    torch.testing.assert_close(parallel, X + 0.3 * (one(X) + other(X)))
    torch.testing.assert_close(stream, X + 0.3 * one(X))
    torch.testing.assert_close(branch, X + 0.3 * one(X))
    torch.testing.assert_close(gated, one(X) + X * other(X))


def test_queries_that_may_attend_to_nothing():
    """Hugging Face masks with the dtype's minimum; what shaped attention does for such queries needs -inf."""
    allowed = torch.ones(5, 5, dtype=torch.bool)
    allowed[2] = False
    with ShapeAttention(0.3):
        found = F.scaled_dot_product_attention(Q, K, V, attn_mask=(~allowed).double() * torch.finfo(Q.dtype).min)
    torch.testing.assert_close(found, 0.3 * shaped_attention(Q, K, V, attn_mask=allowed))
    assert not found[:, :, 2].any()


def test_gradients_of_checkpointed_parts_are_those_of_the_change():
    class Checkpointed(Attributes):
        def forward(self, x: Tensor) -> Tensor:
            bias = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
            for block in (self.first, self.second):
                x = checkpoint(block, x, bias, use_reentrant=False) if self.again else block(x, bias)
            return x

    torch.manual_seed(65)
    model = Checkpointed().double()
    gradients = []
    for model.again in (True, False):  # pyright: ignore
        gradients.append([layer.gradients for layer in observe(model, X, change=ShapeAttention(0.5)).stacks[0].layers])
    for one, other in zip(*gradients, strict=True):
        assert one == pytest.approx(other, rel=1e-9)


@pytest.fixture(scope="module")
def collapsed() -> nn.Module:
    torch.manual_seed(66)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 24, batch_first=True, bias=False), 16, enable_nested_tensor=False
    )
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.in_proj_weight[2 * WIDTH :] *= 4.0  # pyright: ignore
    return model


def test_each_verdict_has_remedies_that_were_measured(collapsed):
    before = copy.deepcopy(collapsed.state_dict())
    x = X.float()
    found = shaped.diagnose(collapsed, x, seeds=0, remedies=True)
    assert all(torch.equal(value, before[name]) for name, value in collapsed.state_dict().items())
    (verdict,) = [finding for finding in found.verdicts if finding.name == "rank collapse"]
    assert found.remedies is not None
    shape, weaken = sorted(found.remedies.of(verdict), key=lambda trial: not trial.remedy.startswith("shape"))
    gamma = float(shape.remedy.split()[-1])
    assert shape.before == verdict.value
    assert shape.removed
    assert weaken.removed
    assert "shaped.nn.functional.shaped_attention(q, k, v, …) in place of" in str(shape)
    assert "0.0312 * branch(x)" in str(weaken)  # 32 branches
    assert f"correlation behind the last layer {show(shape.before)} → {shape.after:.3g}; removes the verdict" in str(shape)
    after = {}
    for one in (1.0, 0.5, 0.2):
        after[one] = list_curves(observe(collapsed, x, change=ShapeAttention(one)).stacks[0])["correlation"][-1]
    assert gamma == max(one for one, rho in after.items() if rho < 0.95) < 1.0
    assert shape.after == after[gamma]
    assert found.to_json()["remedies"][0]["outcome"] == found.remedies[0].outcome
    lines = describe_verdicts(found).split("\n")
    assert lines[lines.index(str(verdict)) + 1] == f"  {found.remedies.of(verdict)[0]}"
    few = try_remedies(collapsed, x, found.observation, passes=1)
    assert any(trial.problem == "more than 1 passes" for trial in few)
    assert shaped.diagnose(collapsed, x, seeds=0).remedies is None


def test_what_does_not_help_is_told():
    torch.manual_seed(67)
    model = ListOfLists(2)
    with torch.no_grad():
        for attention, _ in model.layers:  # pyright: ignore
            attention.qkv.weight *= 30.0
    found = shaped.diagnose(model, X.float(), seeds=0, remedies=True)
    trials = {trial.remedy: trial for trial in found.remedies or () if trial.verdict == "entropy collapse"}
    assert str(trials["QK-norm"]) == "QK-norm: not tried: the model computes its softmax itself"
    (cooled,) = [trial for name, trial in trials.items() if name.startswith("divide logits")]
    assert not cooled.removed
    assert cooled.after > cooled.before
    assert "not enough" in str(cooled) or "did not help" in str(cooled)
    with torch.no_grad():
        model.layers[0][0].qkv.weight[0, 0] = torch.nan  # pyright: ignore
    assert shaped.diagnose(model, X.float(), seeds=0, remedies=True).remedies == ()


def test_a_remedy_that_brings_another_verdict_is_not_praised():
    before = judge(make_observation(tokens=replace(HEALTHY, correlation=0.99)))
    (finding,) = [one for one in before if one.at_risk]
    variant = SHAPE.list_variants(4)[1]

    def outcome(**changes: Any) -> str:
        seen = make_observation(**changes)
        return compare(finding, before, SHAPE, variant, Attempt(seen, judge(seen)), True)[0].outcome

    assert outcome() == "removes the verdict"
    assert outcome(tokens=replace(HEALTHY, correlation=-0.1)) == "removes the verdict"  # the rule is silent
    assert outcome(gradients={"weight": 1e-3}) == "removes the verdict, but then: exploding gradients"
    assert outcome(tokens=replace(HEALTHY, correlation=0.96)) == "nearer to the threshold, not enough"
    assert outcome(tokens=replace(HEALTHY, correlation=0.991)) == "tried, did not help"
    nothing = compare(finding, before, WEAKEN, WEAKEN.list_variants(4)[0], Attempt(None, (), "no branch"), True)[0]
    assert (nothing.outcome, nothing.removed, math.isnan(nothing.after)) == ("not tried: no branch", False, True)
    seen = make_observation(attention={"attn": replace(CALL, entropy=(math.nan,))})
    for broken in (replace(seen, non_finite="the loss"), make_observation(tokens=replace(HEALTHY, correlation=math.nan))):
        trial, decades = compare(finding, before, SHAPE, variant, Attempt(broken, judge(broken)), True)
        assert (trial.removed, trial.outcome, decades) == (False, "tried, did not help", math.inf)  # not "nearer"
    assert variant.hf_code == "shaped.hf.shape(model, gamma=0.5)"
    assert compare(finding, before, SHAPE, variant, Attempt(seen, judge(seen)), True)[0].code == variant.hf_code
    assert compare(finding, before, SHAPE, variant, Attempt(seen, judge(seen)), False)[0].code == variant.code


def test_a_stronger_remedy_is_tried_only_if_needed():
    before = judge(make_observation(tokens=replace(HEALTHY, correlation=0.99)))
    tried: list[str] = []

    def attempt(remedy: Remedy, variant: Variant) -> Attempt:
        tried.append(variant.name)
        changes: dict[str, Any] = {"tokens": replace(HEALTHY, correlation=0.97)} if len(tried) == 1 else {}
        changes |= {"gradients": {"weight": 1e-3}} if len(tried) == 2 else {}
        seen = make_observation(**changes)
        return Attempt(seen, judge(seen))

    trial = choose_trial(before[0], before, SHAPE, SHAPE.list_variants(4), attempt, True)
    assert tried == ["shape attention with gamma 1", "shape attention with gamma 0.5", "shape attention with gamma 0.2"]
    assert (trial.remedy, trial.outcome) == ("shape attention with gamma 0.2", "removes the verdict")
    assert [variant.code[:20] for variant in WEAKEN.list_variants(8)] == ["x + 0.25 * branch(x)", "x + 0.0625 * branch("]


def test_every_verdict_has_remedies():
    assert REMEDIES.keys() == RULES.keys()
    variants = {variant.code for remedies in REMEDIES.values() for remedy in remedies for variant in remedy.list_variants(12)}
    assert len(variants) <= 12
