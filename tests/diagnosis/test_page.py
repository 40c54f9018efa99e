"""The page: well-formed, escaped, without a request to anywhere, and its charts at the right places."""

import base64
import hashlib
import math
import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from plain_models import WIDTH, Attributes, ListOfLists
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, T5Config

import shaped
from shaped.diagnosis.page import render_page
from shaped.diagnosis.page.axes import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, Axis, choose_axis, place_stage, write_ticks
from shaped.diagnosis.page.axes import WIDTH as BREADTH
from shaped.diagnosis.page.charts import draw_curve, draw_gradients, draw_heads
from shaped.diagnosis.page.document import CURVES
from shaped.diagnosis.page.text import show_share
from shaped.diagnosis.verdicts import RULES
from shaped.html.text import show
from shaped.testing.stats import generator

X = torch.randn(2, 5, WIDTH, generator=generator(71))
ATTACK = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
VOID = {"meta", "br"}
CLOSED = {"circle", "line", "rect", "polyline", "polygon"}
TAGS = (
    VOID
    | CLOSED
    | {
        *("html", "head", "title", "style", "body", "main", "section", "h1", "h2", "h3", "p", "ul", "li", "b", "span", "code", "div"),
        *("table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "svg", "text", "g"),
    }
)
ATTRIBUTES = {
    *("lang", "charset", "name", "content", "http-equiv", "class", "role", "tabindex", "aria-label", "aria-hidden", "scope", "viewbox"),
    *("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height", "points", "text-anchor", "fill-opacity"),
}


class Reader(HTMLParser):
    """Refuses what is not closed, and every tag and attribute that the page does not need: among them all that could load something."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()
        self.texts: list[str] = []
        self.labels: list[str] = []
        self.policy = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        assert {name for name, _ in attrs} <= ATTRIBUTES, attrs
        given = dict(attrs)
        self.seen[tag] += 1
        if tag == "svg":
            assert given.get("role") == "img" or given.get("aria-hidden") == "true"
            self.labels += [given["aria-label"] or ""] if "aria-label" in given else []
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


class Hostile(nn.Module):
    """Its layers have names that would run as a script."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, batch_first=True)
        name = ATTACK.replace(".", "")
        self.parts = nn.ModuleDict({f"{name}{number}": layer for number in range(2)})

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


def diagnose(model: nn.Module, **options: Any) -> dict[str, Any]:
    return shaped.diagnose(model, X, seeds=options.pop("seeds", 1), **options).to_json()


def test_names_and_texts_are_escaped_and_nothing_is_loaded():
    torch.manual_seed(72)
    content = diagnose(Hostile())
    content["info"] |= {"name": ATTACK, "about": ATTACK, "model": ATTACK}
    verdict = content["findings"][0] | {"name": "rank collapse", "sentence": ATTACK, "source": ATTACK, "layers": [ATTACK]}
    content["verdicts"] = [verdict]
    trial = {"verdict": "rank collapse", "stack": verdict["stack"], "remedy": ATTACK, "reason": ATTACK, "quantity": ATTACK, "code": ATTACK}
    trial |= {"before": 0.99, "after": 0.1, "removed": True, "appeared": [], "risk": 0.2, "problem": "", "outcome": ATTACK}
    content |= {"remedies": [trial], "bands_source": ATTACK}
    page = render_page(content)
    assert "<script" not in page
    assert "<img" not in page
    read = Reader(page)
    assert sum(ATTACK in text for text in read.texts) > 10
    assert any(ATTACK in label for label in read.labels) or any(ATTACK in text for text in read.texts)
    assert not re.search(r"url\(|@import|https?:|//", page)


def test_the_policy_allows_this_style_and_nothing_else():
    torch.manual_seed(73)
    page = render_page(diagnose(Attributes()))
    style = page[page.index("<style>") + len("<style>") : page.index("</style>")]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert Reader(page).policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert "prefers-color-scheme: dark" in style
    assert '<meta name="viewport" content="width=device-width' in page


def test_verdicts_come_first_with_their_numbers_and_remedies(tmp_path):
    torch.manual_seed(74)
    model = ListOfLists(2)
    with torch.no_grad():
        for attention, _ in model.layers:  # pyright: ignore
            attention.qkv.weight *= 8.0
    found = shaped.diagnose(model, X, seeds=1, remedies=True)
    json_file, html_file = found.save(tmp_path)
    page = html_file.read_text()
    assert page == render_page(found.to_json())
    assert json_file.exists()
    text = " ".join("".join(Reader(page).texts).split())
    (verdict,) = [one for one in found.verdicts if one.name == "entropy collapse"]
    assert text.index(verdict.sentence) < text.index("Correlation") < text.index("All rules")
    for said in (
        f"value {show(verdict.value)}",
        "threshold 0.05",
        f"source {verdict.source}",
        "not tried: the model computes its softmax itself",
    ):
        assert said in text
    (cooled,) = [trial for trial in found.remedies or () if trial.remedy.startswith("divide logits") and trial.verdict == verdict.name]
    assert f"{cooled.quantity} {show_share(cooled.before)} → {show_share(cooled.after)}; {cooled.outcome}" in text
    titles = ("Correlation", "Effective rank", "Length", "Kurtosis", "Entropy", "Entropy of each head", "Largest logit", "Gradient")
    for title in (*titles, "Gradient of each matrix", "Dead units"):
        assert f"<figcaption>{title} <" in page
    (call,) = found.observation.stacks[0].layers[1].attention.values()
    share = call.entropy[1] / call.uniform_entropy[1]
    assert f"layer 2, head 2: {show(call.entropy[1])} nats, {show_share(share)} of the uniform entropy" in text
    assert "0.qkv.weight, layer 1: " in text
    labels = Reader(page).labels
    assert len(labels) == 10
    rho = found.layers[-1]["correlation"]
    assert any(label.startswith("Correlation over the layers") and f"{show_share(rho)} at layer 2" in label for label in labels)


def test_each_head_of_self_and_cross_attention_has_its_own_uniform_entropy():
    """Queries of a decoder's self-attention see 1 to 6 keys, those of its cross-attention 24."""
    torch.manual_seed(76)
    sizes: dict[str, Any] = {"vocab_size": 30, "num_heads": 2, "num_layers": 1, "d_model": 16, "d_kv": 8, "d_ff": 24}
    sizes["decoder_start_token_id"] = 0
    model = AutoModelForSeq2SeqLM.from_config(T5Config(**sizes))
    long, short = (torch.randint(3, 30, (2, tokens), generator=generator(77)) for tokens in (24, 6))
    found = shaped.diagnose(model, {"input_ids": long, "labels": short}, seeds=0)
    own, cross = found.observation.stacks[1].layers[0].attention.values()
    assert own.uniform_entropy == pytest.approx(2 * (math.log(math.factorial(6)) / 6,))
    assert cross.uniform_entropy == pytest.approx(2 * (math.log(24),))
    text = " ".join("".join(Reader(render_page(found.to_json())).texts).split())
    expected = [entropy / uniform for call in (own, cross) for entropy, uniform in zip(call.entropy, call.uniform_entropy, strict=True)]
    assert all(0.0 < share <= 1.0 for share in expected)
    *_, last = text.split("Entropy of each head")  # the decoder's
    assert re.findall(r"head \d: \S+ nats, (.*?) of the uniform entropy", last) == [show_share(share) for share in expected]


def test_a_model_that_is_not_finite_and_one_without_risk_have_a_page():
    torch.manual_seed(75)
    model = ListOfLists(2)
    assert "No rule found a risk" in render_page(diagnose(model, seeds=0) | {"verdicts": [], "remedies": None})
    with torch.no_grad():
        model.layers[1][0].qkv.weight[0, 0] = math.nan  # pyright: ignore
    page = render_page(diagnose(model, seeds=0, remedies=True))
    Reader(page)
    assert "the first value that is not finite: parameter layers.1.0.qkv.weight" in page
    assert "Gradient of each matrix" not in page  # they are all nan: its chart would be empty


def test_points_and_bands_are_where_their_values_are():
    drawn = draw_curve("Length", "", [1.0, 3.0, 2.0], 2, band={"low": [0.0, 1.0, 1.0], "mean": [1.0, 2.0, 2.0], "high": [2.0, 4.0, 3.0]})
    left, middle, right = LEFT, (LEFT + BREADTH - RIGHT) / 2, BREADTH - RIGHT
    at = {value: HEIGHT - BOTTOM - value / 4.0 * (HEIGHT - TOP - BOTTOM) for value in (0.0, 1.0, 2.0, 3.0, 4.0)}
    points = [(left, 1.0), (middle, 3.0), (right, 2.0)]
    assert f'<polyline class="curve" points="{" ".join(f"{x:.1f},{at[y]:.1f}" for x, y in points)}"/>' in drawn
    outline = [(left, 0.0), (middle, 1.0), (right, 1.0), (right, 3.0), (middle, 4.0), (left, 2.0)]
    assert f'<polygon class="band" points="{" ".join(f"{x:.1f},{at[y]:.1f}" for x, y in outline)}"/>' in drawn
    assert "<title>layer 1: 3, band 1 to 4</title>" in drawn
    broken = draw_curve("Dead units", "", [0.2, None, 0.7], 3, threshold=0.5, flagged=[3], within=(0.0, 1.0))
    assert broken.count('<polyline class="curve"') == 2
    assert f'class="limit" x1="{LEFT}" x2="{BREADTH - RIGHT}" y1="{Axis(0.0, 1.0, False).place(0.5):.1f}"' in broken
    assert broken.count("dot flag") == 1
    assert place_stage(1, 3) == pytest.approx(LEFT + (BREADTH - LEFT - RIGHT) / 3)


def test_numbers_of_an_axis_are_those_of_its_lines():
    """Three digits would write 1.01 at 1.005 and at 1.01."""
    for low, high in ((0.995, 1.015), (3.3, 3.5), (0.0, 1.0), (1234.0, 1236.0), (-0.5, 1.0)):
        ticks = Axis(low, high, False).ticks
        assert [float(label) for label in write_ticks(ticks)] == pytest.approx(ticks, abs=1e-3 * (high - low))
    assert write_ticks(Axis(0.02, 50.0, True).ticks)[0] == "0.1"
    assert write_ticks(Axis(0.995, 1.015, False).ticks)[2] == "1.005"


def test_axes_hold_all_values():
    for values, logarithmic, within, ends in (
        ([0.1, 0.93], False, (0.0, 1.0), (0.0, 1.0)),
        ([-0.02, 0.93], False, (0.0, 1.0), (0.0, 1.0)),
        ([-0.5, 0.9], False, (0.0, 1.0), (-0.5, 1.0)),
        ([3.31, 3.48], False, None, (3.3, 3.5)),
        ([0.03, 45.0], True, None, (0.02, 50.0)),
        ([0.0, 1e-20, 1.0], True, None, (1e-9, 1.0)),
        ([1.0, 1.0], False, None, (0.0, 2.0)),
        ([None], True, None, (1.0, 2.0)),
    ):
        axis = choose_axis(values, logarithmic, within)
        assert (axis.low, axis.high) == pytest.approx(ends, abs=1e-12), values
        assert 2 <= len(axis.ticks) <= 9, values
        assert all(axis.low - 0.01 * abs(axis.low) <= tick <= 1.01 * axis.high for tick in axis.ticks)
    assert Axis(0.01, 100.0, True).place(1.0) == pytest.approx((TOP + HEIGHT - BOTTOM) / 2)
    assert "logarithmic" in draw_curve("Length", "", [1.0, 10.0], 1, may_be_logarithmic=True)
    assert "logarithmic" not in draw_curve("Length", "", [1.0, 9.0], 1, may_be_logarithmic=True)


def test_many_heads_and_many_matrices_are_summarised():
    entropies: list[list[float | None]] = [[float(head) for head in range(101)] for _ in range(40)]
    drawn = draw_heads("Entropy", "", [[head / 100.0 for head in range(101)]] * 40, entropies)
    assert drawn.count("<rect") == 5 * 40
    assert "layer 40, first quartile: 25 nats, 0.25 of the uniform entropy" in drawn
    few = draw_heads("Entropy", "", [[0.5, None]], [[1.0, None]])
    assert 'fill-opacity="0.53"' in few
    assert few.count('class="empty"') == 1
    layers = [{"gradients": {f"matrix{number}": 10.0**-number for number in range(20)}} for _ in range(3)]
    lines = draw_gradients("Gradient", "norm.", layers)
    assert lines.count("<li>") == 12
    assert "8 more are in the JSON file" in lines
    assert "matrix3, layer 2: 0.001" in lines


def test_every_rule_is_seen_on_a_curve():
    """What is not finite is no value of a curve."""
    assert {name for name, rule in RULES.items() if rule.curve not in CURVES} == {"non-finite values"}
    # Thresholds of others are shares or factors of what their curves show.
    assert {name for name, rule in RULES.items() if rule.is_on_curve} == {"rank collapse", "dead units"}


def test_numbers_in_words():
    assert [show(value) for value in (None, 0.99999, 1e-17, 12345.0)] == ["not finite", "1", "0", "1.23e+04"]
    assert [show_share(value) for value in (0.99999, 1.0 - 1e-7, 1.0, 0.5)] == ["1 − 1e-05", "1 within 2e-06", "1", "0.5"]
