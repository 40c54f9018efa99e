"""`python docs/building/check_site.py SITE` looks at a built site: links, requests, search, formulas, pictures.

Every local link and anchor leads somewhere, no page asks for anything from elsewhere, search finds, formulas and pictures are drawn. The
last three need a browser; without one they are left out, with a word.

It belongs to `make docs` and not to the tests, which run before there is a site.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync")
SEARCHES = {"rank collapse": "diagnose", "backpropagate": "gradients", "largest safe gamma": "advise"}
"""Words, and a part of the address of a page that must be found by them."""


class Page(HTMLParser):
    """The anchors of a page, what it links to, and what it loads."""

    def __init__(self, file: Path):
        super().__init__()
        self.anchors, self.links, self.loaded = set[str](), list[str](), list[str]()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("img", "script", "source", "iframe") and "src" in given:
            self.loaded.append(given["src"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "shortcut icon"):
            self.loaded.append(given["href"])


def find_dead_links(site: Path, pages: dict[Path, Page]) -> Iterator[str]:
    for file, page in pages.items():
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme in ("data", "mailto") or (parts.scheme and link in page.links):
                continue
            if parts.scheme or parts.netloc:
                yield f"{file.relative_to(site)} loads {link}, which is elsewhere"
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not target.exists():
                yield f"{file.relative_to(site)} links to {link}, which is not there"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{file.relative_to(site)} links to {link}, an anchor that is not there"


def look(site: Path, pages: dict[Path, Page], browser_path: str) -> Iterator[str]:
    """Opens every page from file:// without a network, and searches."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_path, args=list(FLAGS))
        context = browser.new_context(offline=True, viewport={"width": 400, "height": 800})
        tab, asked, errors = context.new_page(), list[str](), list[str]()
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("pageerror", lambda error: errors.append(str(error)))
        for file in pages:
            name = file.relative_to(site)
            asked.clear()
            errors.clear()
            tab.goto(file.as_uri(), wait_until="load")
            yield from (f"{name} asks for {url}" for url in asked if not url.startswith(("file:", "data:")))
            yield from (f"{name}: {error}" for error in errors)
            if tab.evaluate("document.documentElement.scrollWidth > window.innerWidth + 1"):
                yield f"{name} is wider than a screen of 400 pixels"
            broken = tab.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth && i.loading != 'lazy').map(i => i.src)")
            yield from (f"{name} does not show {url}" for url in broken)
            flat = tab.evaluate(
                "[...document.querySelectorAll('article math')].filter(m => !m.getBoundingClientRect().width && m.offsetParent).length"
            )
            if flat:
                yield f"{name} has {flat} formulas that are not drawn"
        for words, address in SEARCHES.items():
            tab.goto(f"{(site / 'search.html').as_uri()}?q={words.replace(' ', '+')}")
            try:
                tab.wait_for_selector("#search-results li a", timeout=10_000)
            except Exception:
                yield f"search finds nothing for {words!r}"
                continue
            tab.wait_for_timeout(300)
            hits = tab.evaluate("[...document.querySelectorAll('#search-results li a')].map(a => a.href)")
            if not any(address in hit for hit in hits):
                yield f"search for {words!r} does not find {address}: {hits[:5]}"
        browser.close()


def main(site: Path) -> int:
    pages = {file.resolve(): Page(file) for file in sorted(site.resolve().rglob("*.html"))}
    wrong = list(find_dead_links(site.resolve(), pages))
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"no browser ({', '.join(BROWSERS)}): requests and search are not checked")
    else:
        wrong += look(site.resolve(), pages, browser)
    for line in wrong:
        print(line, file=sys.stderr)
    elsewhere = {urlsplit(link).netloc for page in pages.values() for link in page.links if urlsplit(link).netloc}
    links = sum(len(page.links) + len(page.loaded) for page in pages.values())
    print(f"{len(pages)} pages, {links} links, {len(wrong)} faults; links to other hosts, not followed: {', '.join(sorted(elsewhere))}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
