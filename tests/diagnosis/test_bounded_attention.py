"""Heads whose normalised queries and keys cannot select a token: which of them are noticed, and what helps."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shaped
from shaped.diagnosis import Diagnosis
from shaped.hf import ShapedConfig, ShapedForMaskedLM
from shaped.nn.functional import rms_norm
from shaped.testing.stats import generator

WIDTH, HEADS, TOKENS = 32, 2, 12
D = WIDTH // HEADS
X = torch.randn(2, TOKENS, WIDTH, generator=generator(91))


class Block(nn.Module):
    def __init__(self, normalise: Any, scale: float | None = None, bias: bool = False):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.normalise, self.scale, self.bias = normalise, scale, bias

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = torch.arange(x.shape[1]).to(x)[None, :].neg() if self.bias else None
        mixed = F.scaled_dot_product_attention(self.normalise(q), self.normalise(k), v, attn_mask=mask, scale=self.scale)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def unit_length(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def unchanged(x: Tensor) -> Tensor:
    return x


def diagnose(*block: Any, x: Tensor = X, **options: Any) -> Diagnosis:
    torch.manual_seed(5)
    model = nn.Sequential(*(Block(*block) for _ in range(2))).to(x.dtype)
    return shaped.diagnose(model, x, seeds=0, **options)


def share(logit: float) -> float:
    """Of one key at this logit, all others at its negative."""
    logits = torch.full((TOKENS,), -logit, dtype=torch.float64)
    logits[3] = logit
    return float(logits.softmax(0)[3])


@pytest.mark.parametrize(
    ("block", "largest"),
    [
        ((unit_length,), D**-0.5),  # the default scale expects a root mean square of 1
        ((unit_length, 1.0), 1.0),
        ((rms_norm, 0.05), 0.05 * D),
        ((lambda x: F.layer_norm(x, (D,)), -0.05), 0.05 * D),
    ],
    ids=["unit length", "unit length, scale 1", "QK-norm", "LayerNorm"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_that_cannot_select_a_token_are_noticed(block: tuple[Any, ...], largest: float, dtype: torch.dtype):
    found = diagnose(*block, x=X.to(dtype))
    (notice,) = [finding for finding in found.verdicts if finding.name == "bounded attention"]
    assert notice.value == pytest.approx(share(largest), rel=1e-9)
    assert notice.layers == ("0", "1")
    assert found.risk < 0.5


@pytest.mark.parametrize(
    ("block", "x"),
    [
        ((unchanged,), X),
        ((unchanged,), X[:, :1].expand(-1, TOKENS, -1)),  # all tokens alike: all lengths too, but nothing fixes them
        ((unit_length, None, True), X),  # a bias selects
    ],
    ids=["not normalised", "tokens alike", "bias"],
)
def test_other_heads_are_not_judged(block: tuple[Any, ...], x: Tensor):
    assert not any(finding.name == "bounded attention" for finding in diagnose(*block, x=x).findings)


def test_the_usual_qk_norm_passes():
    (finding,) = [one for one in diagnose(rms_norm).findings if one.name == "bounded attention"]
    assert finding.value == pytest.approx(share(math.sqrt(D)))
    assert not finding.at_risk


@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_keys_that_are_masked_do_not_count(kind: torch.dtype):
    """A query that sees few keys can select one of them."""
    window = (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None, :]) % TOKENS < 2
    mask = window if kind == torch.bool else torch.zeros(TOKENS, TOKENS).masked_fill(~window, torch.finfo(kind).min)

    class Windowed(nn.Module):
        def __init__(self):
            super().__init__()
            self.v = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q = unit_length(x)[:, None]
            return x + F.scaled_dot_product_attention(q, q, self.v(x)[:, None], attn_mask=mask, scale=1.0)[:, 0]

    found = shaped.diagnose(nn.Sequential(Windowed(), Windowed()), X, seeds=0)
    (finding,) = [one for one in found.findings if one.name == "bounded attention"]
    assert finding.value == pytest.approx(1.0 / (1.0 + math.exp(-2.0)))
    assert not finding.at_risk
    assert next(iter(found.layers[0]["heads"].values()))["largest_share"] == pytest.approx(finding.value)


def test_a_scale_that_lifts_the_bound_altogether_removes_the_notice():
    """One key among 512 can then get everything, to the last digit."""
    found = diagnose(unit_length, 2.2, x=torch.randn(1, 512, WIDTH, generator=generator(93)), remedies=True)
    assert found.remedies is not None
    (trial,) = [one for one in found.remedies if one.verdict == "bounded attention"]
    assert (trial.remedy, trial.removed, trial.after) == ("multiply logits by 10", True, 1.0)


def test_a_larger_scale_removes_the_notice():
    found = diagnose(unit_length, remedies=True)
    assert found.remedies is not None
    (trial,) = [one for one in found.remedies if one.verdict == "bounded attention"]
    assert (trial.remedy, trial.removed) == ("multiply logits by 10", True)
    assert trial.after == pytest.approx(share(10.0 * D**-0.5))


@pytest.mark.parametrize(("tau0", "noticed"), [(1.0, True), (None, False)])
def test_shaped_models_with_qk_norm(tau0: float | None, noticed: bool):
    """At the paper's temperature logits are bounded by √(n_k/n)/τ0; the default with QK-norm is another one."""
    torch.manual_seed(6)
    given: dict[str, Any] = {"vocab_size": 20, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "qk_norm": True}
    given |= {} if tau0 is None else {"tau0": tau0}
    model = ShapedForMaskedLM(ShapedConfig(**given))
    ids = torch.randint(5, 20, (2, TOKENS), generator=generator(92))
    found = shaped.diagnose(model, {"input_ids": ids, "labels": ids}, seeds=0)
    (finding,) = [one for one in found.findings if one.name == "bounded attention"]
    assert finding.at_risk == noticed
    assert finding.value == pytest.approx(share(math.sqrt(D / WIDTH) / (WIDTH**-0.5 if tau0 is None else tau0)), rel=1e-6)
