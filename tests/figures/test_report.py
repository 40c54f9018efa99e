"""report.html: its order, its tables, what is escaped, what it may load, and how it looks in a browser."""

import base64
import hashlib
import io
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from refusals import refused
from shaped.figures.harness import cache, reproduce
from shaped.figures.harness.claims import judge
from shaped.figures.harness.page import Result
from shaped.figures.harness.report import render, write_report
from shaped.figures.harness.report.news import describe_news, read_state, take_state
from shaped.figures.harness.simulator import Simulator

BAD = "<script>&\"'"
CHROMIUM = shutil.which("chromium")
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"
WHY = "a known reason"


def make_picture(width: int = 2000, seen: str = "two curves, 1 and 2") -> cache.Picture:
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, np.zeros((10, width)), format="png")
    return cache.Picture(buffer.getvalue(), seen, width, 10)


def make_claims(id: str, *intervals: tuple[float, float]) -> list[dict[str, Any]]:
    """A claim of at most 1 for m = 2, 4, …"""
    cases = [(2 * (i + 1), sum(ends) / 2, ends) for i, ends in enumerate(intervals)]
    rows = [judge(f"{id}.law", m, f"words of {id}", value, ends, at_most=1.0, why=WHY) for m, value, ends in cases]
    return [*rows, judge(f"{id}.other", 4, "other words", 0.1, (0.0, 0.2), at_most=1.0)]


def make_page(claims: list[dict[str, Any]], **changed: Any) -> dict[str, Any]:
    summary = {"title": "a title", "shows": "What it shows.", "scale": "quick", "tokens": 4, "seed": 0, "device": "cpu", "version": "1"}
    about = {"settings": {"n": 3}, "seconds": 1.0, "claims": claims, "table": {}, "arrays_sha256": "0" * 64}
    return summary | about | changed


PAGES = {
    "fig1": make_page(make_claims("fig1", (0.0, 0.5), (0.1, 0.6), (0.2, 0.7)), title="all is well"),
    "fig2": make_page(make_claims("fig2", (0.0, 0.5), (0.5, 1.5), (0.5, 0.6)), title="one is open"),
    "fig3": make_page(make_claims("fig3", (1.5, 2.5), (0.5, 1.5), (0.25, 0.5)), title="one fails"),
    "table1": make_page([judge("table1.x", None, "trained", 2.0, (1.5, 2.5), at_most=1.0)], tokens=None, scale="training"),
}


class Reader(HTMLParser):
    """Links, ids and pictures in their order; the texts of the cells of each table, row by row; every tag is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.rows: list[list[str]] = []
        self.policy = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert tag not in ("script", "link", "iframe", "object", "base", "form")
        assert not any(name.startswith("on") or name == "style" for name in given)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.links += [given["href"] or ""] if "href" in given else []
        self.images += [given] if tag == "img" else []
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        if "wide" in str(given.get("class")):
            self.rows = self.tables[given["aria-label"] or ""] = []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def read(pages: dict[str, dict[str, Any]] = PAGES, **how: Any) -> Reader:
    return Reader(render(pages, {id: make_picture() for id in pages}, **how))


def test_what_fails_comes_first_with_links_to_the_figures():
    page = read()
    assert page.ids == ["open", "fig1", "fig2", "fig3", "table1"]
    tables = list(page.tables)
    assert tables[:3] == ["Claims: fails", "Claims: fails in training", "Claims: not proved"]
    assert [row[0] for name in tables[:3] for row in page.tables[name][1:]] == ["fig3", "table1", "fig2"]
    assert {"#fig1", "#fig2", "#fig3", "#table1", "#open"} <= set(page.links)
    (fails,) = page.tables["Claims: fails"][1:]
    assert "words of fig3" in fails[1]
    assert f"m = 2: {WHY}." in fails[1], "the reason, and for which numbers of tokens"
    assert [cell.split() for cell in fails[2:]] == [
        ["2", "[1.5,", "2.5]", "✗", "fails"],
        ["1", "[0.5,", "1.5]", "?", "not", "proved"],
        ["0.375", "[0.25,", "0.5]", "✓", "holds"],
        ["at", "most", "1"],
    ]


def test_where_every_claim_holds_the_report_says_so():
    text = render({"fig1": PAGES["fig1"]}, {"fig1": make_picture()})
    assert "Every claim holds." in text
    assert "Claims: fails" not in text


def test_a_claim_has_one_row_and_a_column_for_each_number_of_tokens():
    page = read()
    rows = page.tables["Claims of fig2"]
    assert rows[0] == ["claim", "m = 2", "m = 4", "m = 6", "must be"]
    assert len(rows) == 3
    assert rows[2][1:4:2] == ["–", "–"], "this claim is about four tokens alone"
    assert page.tables["Claims of table1"][0] == ["claim", "measured", "must be"]


def test_claims_of_the_same_words_but_other_ids_stay_apart():
    """table1 has them for other text."""
    rows = [judge(f"table1.{text}", None, "trained", value, (value, value), at_most=1.0) for text, value in (("a", 0.5), ("b", 2.0))]
    table = read({"table1": make_page(rows, tokens=None)}).tables["Claims of table1"]
    assert [row[1].split()[0] for row in table[1:]] == ["0.5", "2"]


def test_contents_say_how_many_fail():
    text = render(PAGES, {id: make_picture() for id in PAGES})
    side = text[text.index('<nav class="side"') : text.index("</nav>")]
    items = [re.sub("<[^>]*>", "", item) for item in side.split("<li>")[1:]]
    assert [item.strip() for item in items[1:4]] == [
        "fig1 all is well✓ 4 hold",
        "fig2 one is open? 1 not proved",
        "fig3 one fails✗ 1 fails, ? 1 not proved",
    ]


def test_pictures_have_double_resolution_and_say_what_is_seen():
    page = read()
    for image in page.images:
        assert image["src"] == f"data:image/png;base64,{base64.b64encode(make_picture().png).decode()}"
        assert (image["width"], image["height"]) == ("1000", "5")
        assert image["alt"] == "two curves, 1 and 2"
    old = render({"fig1": PAGES["fig1"]}, {"fig1": make_picture(seen="")})
    assert 'alt="What it shows."' in old, "a picture of an earlier version has no text of its own"


def test_nothing_is_loaded_and_the_policy_says_so():
    text = render(PAGES, {id: make_picture() for id in PAGES}, docs="../docs")
    page = Reader(text)
    style = text[text.index("<style>") + len("<style>") : text.index("</style>")]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert page.policy == f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert not re.search(r"url\(|@import", style)
    assert set(re.findall(r'https?://[^"< ]*', text)) == {"https://arxiv.org/abs/2306.17759"}
    assert {link for link in page.links if not link.startswith("#")} == {
        *("https://arxiv.org/abs/2306.17759", "../docs/figures.md", "../docs/equations.md"),
    }
    assert "<code>docs/figures.md</code>" in render(PAGES, {id: make_picture() for id in PAGES}), "where the documents are not there"


def test_every_field_is_escaped():
    """Whatever a summary says: none of it becomes HTML."""
    row = {"id": BAD, "claim": BAD, "tokens": BAD, "value": BAD, "interval": [BAD, BAD], "relation": BAD, "threshold": 1.0}
    rows = [row | {"verdict": BAD, "reason": BAD}, row | {"verdict": "fails", "reason": f"must be {BAD} 1: {BAD}"}]
    summary = dict.fromkeys(("title", "shows", "scale", "tokens", "seed", "device", "version"), BAD)
    page = make_page(rows, **summary, settings={BAD: [BAD]}, table={"columns": [BAD], "rows": [[BAD]]})
    text = render({BAD: page}, {BAD: make_picture(seen=BAD)}, news=BAD, docs=BAD, damaged=[BAD])
    assert BAD not in text
    assert "<script" not in text
    Reader(text)


def write_page(out: Path, id: str, value: float, verdicts: float = 1.0) -> None:
    """A figure in a folder, as `reproduce` leaves it."""
    key = reproduce.make_key(id, "quick", Simulator())
    claims = [judge(f"{id}.law", 4, "words", value, (value, value), at_most=verdicts)]
    saved = cache.save(out, id, key, Result({"x": np.array([value])}, claims), 1.0)
    words = {cache.SHOWN: saved.summary["arrays_sha256"], cache.SEEN: "γ from 1 to 2"}
    matplotlib.image.imsave(out / f"{id}.png", np.zeros((2, 1300)), metadata=words)


def test_the_last_line_says_where_to_look_and_what_is_new(tmp_path):
    def report() -> str:
        return write_report(tmp_path, reproduce.FIGURES).line.partition("; ")[2]

    write_page(tmp_path, "fig7", 0.5)
    found = write_report(tmp_path, reproduce.FIGURES)
    assert found.line == f"report: {tmp_path / 'report.html'}: 1 claim: holds 1, not proved 0, fails 0; all figures are new"
    assert "All figures are new." in found.path.read_text()
    assert 'alt="γ from 1 to 2"' in found.path.read_text()
    assert report() == "nothing new since the last report"
    write_page(tmp_path, "fig7", 0.6)
    write_page(tmp_path, "fig8", 0.5)
    assert report() == "new since the last report: fig7 (other numbers, same verdicts), fig8 (not in the last one)"
    write_page(tmp_path, "fig7", 2.0)
    (tmp_path / "fig8.json").unlink()
    assert report() == "new since the last report: fig7 (1 verdict changed), fig8 (no longer in it)"


def test_what_changed_in_a_figure_is_said():
    """Not by its drawn arrays alone, which are of one number of tokens."""
    claims = make_claims("fig1", (0.0, 0.5), (0.1, 0.6))
    moved = [claims[0] | {"value": 0.3}, *claims[1:]]
    before = take_state({"fig1": make_page(claims)})
    for page, words in (
        (make_page(claims), ""),
        (make_page(moved), "other numbers, same verdicts"),
        (make_page(claims, table={"columns": ["x"], "rows": [[1]]}), "other numbers, same verdicts"),
        (make_page(claims, scale="paper", arrays_sha256="1" * 64), "scale paper, before quick, other numbers, same verdicts"),
        (make_page(make_claims("fig1", (2.0, 2.5), (0.1, 0.6), (0.1, 0.6))), "1 verdict changed, 1 claim more"),
        (make_page(claims[1:]), "1 claim gone"),
    ):
        expected = f"new since the last report: fig1 ({words})" if words else "nothing new since the last report"
        assert describe_news(before, take_state({"fig1": page})) == expected


def test_a_report_that_cannot_be_read_says_nothing_of_what_is_new(tmp_path):
    path = tmp_path / "report.html"
    assert read_state(path) == {}
    path.write_bytes(b"\xff")
    assert read_state(path) is None
    for content in ("", "{", "[1]", "{&quot;fig1&quot;: 3}", "{&quot;fig1&quot;: {}}", "{&quot;a b&quot;: {}}", "[" * 10_000):
        path.write_text(f'<meta name="shaped-figures" content="{content}">')
        assert read_state(path) is None, content[:10]
    assert "not known what is new" in write_report(tmp_path, ()).line
    assert read_state(path) == {}, "a report without figures"
    assert describe_news({}, take_state({"fig1": PAGES["fig1"]})) == "all figures are new"


def test_a_report_without_figures_or_without_claims_does_not_say_that_all_hold(tmp_path):
    nothing = write_report(tmp_path, reproduce.FIGURES)
    assert nothing.line.endswith("no claims; there are no figures")
    assert "Figures: none." in nothing.path.read_text()
    for text in (nothing.path.read_text(), render({"table2": make_page([], tokens=None)}, {"table2": make_picture()})):
        assert "Every claim holds" not in text
        assert "There are no claims." in text
        Reader(text)


def test_a_damaged_figure_is_named_in_the_report(tmp_path):
    write_page(tmp_path, "fig7", 0.5)
    write_page(tmp_path, "fig8", 0.5)
    (tmp_path / "fig8.png").unlink()
    text = write_report(tmp_path, reproduce.FIGURES).path.read_text()
    assert "Damaged, and not in this report: fig8 (fig8.png must be a whole PNG" in text
    Reader(text)


def test_a_claim_that_would_hide_another_is_refused(tmp_path):
    key = reproduce.make_key("fig7", "quick", Simulator())
    rows = [judge("fig7.law", 4, "words", value, (value, value), at_most=1.0) for value in (0.5, 2.0)]
    cache.save(tmp_path, "fig7", key, Result({"x": np.zeros(1)}, rows), 1.0)
    with refused("fig7.json", "'fig7.law.m4' twice"):
        cache.read_summary(tmp_path / "fig7.json")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium on the PATH")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield found
        found.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser_nothing_is_requested_and_a_phone_does_not_scroll_sideways(browser, tmp_path, scheme):
    table = {"columns": [f"a long heading {i}" for i in range(12)], "rows": [["x" * 40] * 12]}
    pages = PAGES | {"fig4": make_page(make_claims("fig4", (0.0, 1e9)), table=table)}
    path = tmp_path / "report.html"
    path.write_text(render(pages, {id: make_picture() for id in pages}))
    context = browser.new_context(viewport={"width": 400, "height": 800}, color_scheme=scheme)
    page, requests, complaints = context.new_page(), [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]
    assert page.evaluate("[...document.images].every(one => one.complete && one.naturalWidth == 2000)")
    assert complaints == [], "the policy refused something"
    backs = page.evaluate("[document.body, document.querySelector('.picture')].map(one => getComputedStyle(one).backgroundColor)")
    assert backs == ["rgb(13, 17, 23)" if scheme == "dark" else "rgb(255, 255, 255)", "rgb(255, 255, 255)"]
    beside = "[...document.querySelectorAll('#fig3 .words .verdict')].map(one => one.checkVisibility())"
    assert page.evaluate(beside) == [True, True], "on a phone the verdict is beside the claim"
    assert page.evaluate("document.querySelector('.bar').checkVisibility() && !document.querySelector('.side').checkVisibility()")
    page.set_viewport_size({"width": 1280, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
    page.evaluate("document.querySelector('#table1').scrollIntoView()")
    assert page.evaluate("document.querySelector('.side').getBoundingClientRect().top") == 0, "the contents stay in view"
    context.close()
