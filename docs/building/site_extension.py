"""Builds the site: runs the blocks of all pages beside Sphinx, writes the gallery, the reference and the formulas.

Blocks run in processes of their own, two at a time, while Sphinx reads; a page whose blocks do not print what it shows is a warning,
and `make docs` makes warnings errors. `-D run_blocks=0` leaves them out, to look at a page quickly.
"""

from __future__ import annotations

import multiprocessing
import re
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import mathml
import options
import reference
from gallery import make_page
from pages import ROOT, Outcome, begin_work, find_blocks, run_page

logger = logging.getLogger(__name__)
WORKERS = 2
SCRIPT = re.compile(r"^This page is made from \[examples/(\w+\.py)\]", re.MULTILINE)
"""The line by which a page of docs/gallery says which script it shows."""


class Runs:
    """The runs of one build."""

    def __init__(self, app: Sphinx):
        self.wanted = app.config.run_blocks
        self.pictures = Path(app.doctreedir) / "gallery"
        self.pool = ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn"), initializer=begin_work)
        self.scripts: dict[Path, Future[str]] = {}
        self.pages: dict[Path, Future[Outcome]] = {}

    def start(self) -> None:
        """The gallery first: its pages wait for it."""
        docs = ROOT / "docs"
        for page in sorted((docs / "gallery").glob("*.md")):
            if found := SCRIPT.search(page.read_text()):
                self.scripts[page] = self.pool.submit(make_page, ROOT / "examples" / found[1], self.pictures, docs / "gallery", self.wanted)
        pages = [ROOT / "README.md", *sorted(docs.rglob("*.md"))] if self.wanted else []
        for page in pages:
            text = page.read_text()
            if any(block.runs for block in find_blocks(text)):
                self.pages[page] = self.pool.submit(run_page, text)

    def replace_source(self, app: Sphinx, page: str, source: list[str]) -> None:
        """A page of the gallery becomes its script, with what it prints and draws."""
        run = self.scripts.get(Path(app.env.doc2path(page)))
        if run is not None:
            source[0] = run.result() + "\n" + source[0].partition("\n")[2]

    def report(self, app: Sphinx, env: BuildEnvironment) -> None:
        """Warns of every block that does not do what its page shows."""
        taken = {}
        for page, run in self.pages.items():
            outcome, name = run.result(), page.relative_to(ROOT)
            taken[f"{name} ({outcome.count})"] = outcome.seconds
            for line, what in outcome.wrong:
                logger.warning("%s", what, location=f"{page}:{line}")
        self.pool.shutdown()
        slowest = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in sorted(taken.items(), key=lambda one: -one[1])[:8])
        logger.info("blocks of %d pages, %.1f s in all, two at a time: %s", len(taken), sum(taken.values()), slowest)


def start_runs(app: Sphinx) -> None:
    runs = Runs(app)
    runs.start()
    app.connect("source-read", runs.replace_source)
    app.connect("env-updated", runs.report)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("run_blocks", True, "env", bool)
    mathml.setup(app)
    options.setup(app)
    reference.setup(app)
    app.connect("builder-inited", start_runs)
    return {"parallel_read_safe": False}
