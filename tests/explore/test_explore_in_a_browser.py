"""The page of `shaped explore` in the system's chromium, against the command itself: what it asks, shows and escapes."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
]
PANELS = ["paths", "density", "eigenvalue", "map", "gradients", "entropy", "blocks", "blocks_length", "blocks_gradients", "blocks_entropy"]
SMALL = "#width=16&depth=8&tokens=2"
PATIENCE = 60_000  # milliseconds; the tests share their cores
HOSTILE = "<img src=x onerror=\"window.broken='yes'\"><script>window.broken='yes'</script>"
# Runs before the page's own scripts: what the content security policy stops.
WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
"""
# The page does not hear of later stages, which may come before it has drawn the first.
KEEP_COARSE = """
const parse = JSON.parse;
JSON.parse = (text) => {
  const line = parse(text);
  return line.stage > 0 ? { kind: "later" } : line;
};
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    command = [sys.executable, "-m", "shaped", "explore", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())
            assert found
            yield found[0]
        finally:
            server.terminate()
            server.wait(30)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Readers:
    """Opens pages, each for a reader of its own, and collects what goes wrong in them."""

    def __init__(self, browser: Browser, address: str):
        self.address, self._browser = address, browser
        self.contexts: list[BrowserContext] = []
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.expected: list[str] = []
        """Parts of messages that a test provokes."""

    def open(self, question: str = SMALL, coarse: bool = False, **how: Any) -> Page:
        context = self._browser.new_context(**how)
        self.contexts.append(context)
        context.set_default_timeout(PATIENCE)
        context.add_init_script(WATCH)
        context.on("request", lambda request: self.requests.append(request.url))
        page = context.new_page()
        if coarse:
            page.add_init_script(KEEP_COARSE)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type in ("error", "warning") else None)
        page.goto(self.address + question)
        return page

    def close(self) -> None:
        violations = [found for context in self.contexts for page in context.pages for found in page.evaluate("violations")]
        for context in self.contexts:
            context.close()
        assert violations == []
        assert [error for error in self.errors if not any(part in error for part in self.expected)] == []


@pytest.fixture
def readers(browser: Browser, address: str) -> Iterator[Readers]:
    readers = Readers(browser, address)
    yield readers
    readers.close()


def wait_for_stage(page: Page, stage: int) -> None:
    """Until all panels show the newest question at this stage or a later one."""
    # A change is asked in the next frame, and until then no panel is stale.
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    condition = "([panels, stage]) => panels.every((id) => { const panel = document.getElementById(`panel-${id}`);"
    condition += " return !panel.classList.contains('stale') && Number(panel.dataset.stage ?? -1) >= stage; })"
    page.wait_for_function(condition, arg=[PANELS, stage])


def read_pictures(page: Page) -> dict[str, str]:
    """The drawing of each panel, without its ids."""
    return {panel: re.sub(r"clip-\d+", "", page.inner_html(f"#panel-{panel} .picture")) for panel in PANELS}


def read_table(page: Page, panel: str) -> dict[str, list[str]]:
    """The numbers of a panel, by column; SDE and networks may have layers of their own."""
    if page.get_attribute(f"#panel-{panel} details", "open") is None:
        page.click(f"#panel-{panel} summary")
    page.locator(f"#panel-{panel} table").first.wait_for()  # the tables come with the event, after the click
    tables = [table.locator("tr").all_inner_texts() for table in page.locator(f"#panel-{panel} table").all()]
    return {name: list(column) for rows in tables for name, *column in zip(*(row.split("\t") for row in rows), strict=True)}


def set_slider(page: Page, name: str, value: float) -> None:
    page.fill(f"#slider-{name}", str(value))


def send_config(page: Page, config: dict[str, Any]) -> None:
    page.set_input_files("#config", {"name": "config.json", "mimeType": "application/json", "buffer": json.dumps(config).encode()})


def test_the_page_asks_no_other_host_and_has_no_error(readers: Readers):
    page = readers.open()
    wait_for_stage(page, 0)
    assert any("answer?" in url for url in readers.requests)
    assert [url for url in readers.requests if not url.startswith(readers.address)] == []


def test_a_slider_changes_every_panel(readers: Readers):
    page = readers.open(coarse=True)
    wait_for_stage(page, 0)
    before = read_pictures(page)
    set_slider(page, "gamma", 900)
    wait_for_stage(page, 0)
    after = read_pictures(page)
    assert [panel for panel in before if before[panel] == after[panel]] == []


def test_bad_input_shows_a_message_at_its_field(readers: Readers):
    page = readers.open()
    wait_for_stage(page, 0)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.fill("#field-gamma", "3")
    assert page.inner_text("#message-gamma") == "gamma must be a number from 0.01 to 1, got 3"
    page.fill("#field-gamma", "much")
    assert page.inner_text("#message-gamma").endswith("got much")
    assert page.get_attribute("#field-gamma", "aria-invalid") == "true"
    assert [url for url in asked if "answer" in url] == []
    page.fill("#field-gamma", "0.5")
    assert page.inner_text("#message-gamma") == ""
    wait_for_stage(page, 0)
    assert any("gamma=0.5" in url for url in asked)


def test_a_refusal_of_the_server_is_shown_until_the_next_change(readers: Readers):
    page = readers.open()
    wait_for_stage(page, 0)
    readers.expected = ["status of 400"]
    page.fill("#field-heads", "3")
    page.wait_for_selector("[data-field=heads].bad")
    page.press("#field-heads", "Tab")
    assert page.inner_text("#message-heads") == "heads must divide the width 16, got 3"
    page.fill("#field-width", "18")
    assert page.inner_text("#message-heads") == ""
    wait_for_stage(page, 0)


def test_the_code_runs_and_gives_the_numbers_of_the_page(readers: Readers):
    page = readers.open(SMALL + "&gamma=0.4&seed=3")
    page.locator("#progress", has_text="final after").wait_for()
    wait_for_stage(page, 2)
    table = read_table(page, "paths")
    page.click("#code")
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(page.inner_text("#python"), names)
    assert "median of the mean correlation" in printed.getvalue()
    assert page.inner_text("#command").startswith("shaped simulate --width 16 --depth 8 --tokens 2 --gamma 0.4")
    for name, column in (("SDE", "SDE, median"), ("networks", "networks, median")):
        assert float(table[column][-1]) == pytest.approx(names["median"][name], rel=1e-4)


def test_two_pages_at_once_have_their_own_answers(readers: Readers):
    pages = {depth: readers.open(f"#width=16&depth={depth}&tokens=2") for depth in (6, 9)}
    for depth, page in pages.items():
        wait_for_stage(page, 1)
        assert read_table(page, "paths")["layer"][-1] == str(depth)


def test_the_address_keeps_the_question(readers: Readers):
    page = readers.open(coarse=True)
    wait_for_stage(page, 0)
    set_slider(page, "tau0", 300)
    page.select_option("#field-mask", "causal")
    page.check("#field-qk_norm")
    wait_for_stage(page, 0)
    again = readers.open(page.url.removeprefix(readers.address), coarse=True)
    wait_for_stage(again, 0)
    fields = "[...document.querySelectorAll('[data-field]')].map((field) => field.querySelector('input, select'))"
    read = f"{fields}.map((input) => input.type === 'checkbox' ? input.checked : input.value)"
    assert again.evaluate(read) == page.evaluate(read)
    assert read_pictures(again) == read_pictures(page)
    page.go_back()
    page.wait_for_selector("#field-qk_norm:not(:checked)")
    assert page.input_value("#field-mask") == "causal"


def test_a_question_at_the_ends_of_the_form_stays_in_sight_and_in_the_address(readers: Readers):
    page = readers.open(SMALL + "&gamma=0.01")
    wait_for_stage(page, 0)
    # Both at once: the next stage draws the picture anew.
    boxes = "(parts) => parts.map((part) => document.querySelector(`#panel-map svg ${part}`).getBoundingClientRect().toJSON())"
    point, picture = page.evaluate(boxes, [".point.outside", ".cell"])
    assert point["x"] + point["width"] / 2 == pytest.approx(picture["x"], abs=1.0)  # gamma is left of the map
    asked = page.url
    page.press("#skip", "Enter")
    assert page.evaluate("document.activeElement.id") == "panels"
    assert page.url == asked
    page.goto(readers.address + SMALL + "&qk_norm=constructor")
    page.wait_for_selector("[data-field=qk_norm].bad")
    assert page.inner_text("#message-qk_norm") == "qk_norm must be true or false, got constructor"


def write_hostile_answer() -> str:
    """An answer whose every text is markup."""
    axis = {"label": HOSTILE, "scale": "linear"}
    names = {"name": HOSTILE, "role": HOSTILE}
    series = [
        {"kind": "line", "x": [0, 1], "y": [0, 1]} | names,
        {"kind": "band", "x": [0, 1], "low": [0, 0], "high": [1, 1]} | names,
        {"kind": "steps", "edges": [0, 0.5, 1], "heights": [1, 2]} | names,
        {"kind": "rule", "y": 0.5} | names,
    ]
    cells = {
        "kind": "cells",
        "x_edges": [0, 1],
        "y_edges": [0, 1],
        "values": [[0.5]],
        "labels": [[HOSTILE]],
        "outlined": [[True]],
        "outline": HOSTILE,
    }
    texts = {"title": HOSTILE, "x": axis, "y": axis, "notes": [HOSTILE], "about": HOSTILE}
    lines: list[dict[str, Any]] = [{"kind": "question", "values": {}, "python": HOSTILE, "command": HOSTILE}]
    for panel in PANELS[:-1]:
        drawn = [cells | names] if panel == "map" else series
        lines.append({"kind": "panel", "panel": panel, "stage": 0, "samples": 1, "seconds": 1.0, "chart": texts | {"series": drawn}})
    lines.append({"kind": "panel", "panel": PANELS[-1], "stage": 0, "error": HOSTILE})
    lines.append({"kind": "error", "error": HOSTILE})
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_no_text_becomes_markup(readers: Readers):
    page = readers.open(f"#gamma={HOSTILE}")
    page.wait_for_selector("[data-field=gamma].bad")
    assert HOSTILE in page.inner_text("#message-gamma")
    page.route("**/answer?*", lambda route: route.fulfill(body=write_hostile_answer()))
    page.click("#reset")
    page.wait_for_selector("#banner:not([hidden])")
    page.wait_for_selector("#panel-blocks_entropy.failed")
    for panel in ("paths", "map"):
        page.click(f"#panel-{panel} summary")
        page.hover(f"#panel-{panel} svg", position={"x": 150, "y": 120})
        assert HOSTILE in page.inner_text(f"#panel-{panel} .readout")
        for part in ("h3", ".notes li"):
            assert page.inner_text(f"#panel-{panel} {part}") == HOSTILE
        page.hover(f"#panel-{panel} .help")
        assert page.inner_text("#tip") == HOSTILE
        assert HOSTILE in (page.text_content(f"#panel-{panel} svg") or "")
        assert HOSTILE in page.inner_text(f"#panel-{panel} .tables")
    assert page.inner_text("#panel-blocks_entropy .trouble") == page.inner_text("#banner-text") == HOSTILE
    page.click("#code")
    assert page.inner_text("#python") == page.inner_text("#command") == HOSTILE
    page.keyboard.press("Escape")
    readers.expected = ["status of 400"]
    page.route("**/config", lambda route: route.fulfill(status=400, json={"error": HOSTILE}))
    send_config(page, {})
    page.wait_for_selector("#config-notes.bad")
    assert page.inner_text("#config-notes") == HOSTILE
    assert page.evaluate("window.broken") is None
    assert page.locator("img, body script").count() == 0


def test_a_config_fills_the_form(readers: Readers):
    page = readers.open()
    send_config(page, {"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 16})
    page.wait_for_selector("#config-notes p")
    assert [page.input_value(f"#field-{name}") for name in ("width", "depth", "heads", "mask")] == ["48", "3", "4", "causal"]
    wait_for_stage(page, 0)


def test_a_lost_server_is_said_and_found_again(readers: Readers):
    page = readers.open()
    wait_for_stage(page, 0)
    page.route("**/answer?*", lambda route: route.abort())
    readers.expected = ["ERR_FAILED"]
    set_slider(page, "rho", 0.5)
    page.wait_for_selector("#banner:not([hidden])")
    assert "does not answer" in page.inner_text("#banner-text")
    page.unroute("**/answer?*")
    wait_for_stage(page, 0)
    assert page.is_hidden("#banner")


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_window(readers: Readers, width: int):
    page = readers.open(SMALL, viewport={"width": width, "height": 800})
    wait_for_stage(page, 0)
    if width == 400:
        assert page.is_hidden("#field-width")
        page.click("#toggle")
    assert page.is_visible("#field-width")
    page.click("#panel-paths summary")
    assert page.evaluate("document.documentElement.scrollWidth") == width
