"""How fast does the page of `shaped explore` answer, and does it leave work or memory behind? Measured in a browser, with the command.

    python benchmarks/explore.py [--starts 5] [--moves 50] [--rapid 100] [--out FILE]

It needs a chromium on the PATH. A time ends when the browser has painted. The machine should be idle: its load stands beside the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import report
from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.table import Table

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
PATIENCE = 120_000  # milliseconds
ROUNDS = 3
# Moves a slider; milliseconds until the first panel and until all panels show the coarse answer, painted.
MOVE = """
async (position) => {
  const panels = [...document.querySelectorAll(".panel")];
  const slider = document.getElementById("slider-gamma");
  const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))));
  slider.value = position;
  const began = performance.now();
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  while (!panels.every((panel) => panel.classList.contains("stale"))) await painted();
  let first = null;
  while (performance.now() - began < 60000) {
    const now = await painted();
    const fresh = panels.filter((panel) => !panel.classList.contains("stale")).length;
    if (fresh > 0) first ??= now - began;
    if (fresh === panels.length) return { first, all: now - began };
  }
  throw new Error("no coarse answer for a minute");
}
"""
# A slider that moves in every frame.
HURRY = """
async (moves) => {
  const slider = document.getElementById("slider-gamma");
  for (let move = 0; move < moves; move += 1) {
    slider.value = 300 + ((37 * move) % 500);
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    await new Promise(requestAnimationFrame);
  }
}
"""


@contextmanager
def start_command() -> Iterator[str]:
    """The address of a server that is started now."""
    with subprocess.Popen([sys.executable, "-m", "shaped", "explore", "--no-browser"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found, "the command did not say its address"
            yield found[0]
        finally:
            server.terminate()


def open_page(page: Page, address: str) -> None:
    page.set_default_timeout(PATIENCE)
    page.goto(address)
    page.wait_for_selector(".panel:not(.waiting) svg")


def read_state(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(address + "state", timeout=30) as answer:
        return json.load(answer)


def time_start(page: Page) -> float:
    """Seconds from the command's start to the first picture, in a browser that is open already."""
    began = time.perf_counter()
    with start_command() as address:
        open_page(page, address)
        return time.perf_counter() - began


def time_moves(page: Page, count: int) -> dict[str, Any]:
    """Each move comes while the answer to the one before is being refined, as by a hand."""
    moves = []
    for move in range(count + 2):
        moves.append(page.evaluate(MOVE, 350 + (37 * move) % 400))
        page.wait_for_timeout(200)
    moves = moves[2:]  # the first ones load what the workers had not needed yet
    return {
        name: {"median": statistics.median(times), "largest": max(times), "all": times}
        for name in ("first", "all")
        if (times := [move[name] for move in moves])
    }


def hurry(page: Page, address: str, count: int) -> list[dict[str, Any]]:
    """After each round of rapid moves the page is closed: seconds until nothing runs, and the memory of all processes."""
    rounds = []
    for _ in range(ROUNDS):
        open_page(page, address)
        before = read_state(address)
        page.evaluate(HURRY, count)
        page.goto("about:blank")
        began = time.perf_counter()
        while (state := read_state(address))["running"] or state["units"]:
            quiet = time.perf_counter() - began
            assert quiet < 60, f"work is left: {state}"
            time.sleep(0.01)
        quiet = time.perf_counter() - began
        memory = {"memory_before_mb": before["memory_mb"], "memory_after_mb": state["memory_mb"]}
        rounds.append({"seconds_until_quiet": quiet, "cancelled": state["cancelled"] - before["cancelled"]} | memory)
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--moves", type=int, default=50)
    parser.add_argument("--rapid", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/explore.json"))
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page()
        starts = [time_start(page) for _ in range(options.starts)]
        with start_command() as address:
            open_page(page, address)
            moves = time_moves(page, options.moves)
            rapid = hurry(page, address, options.rapid)
        browser.close()
    result = {"load_before": load, "load_after": os.getloadavg()[0], "start_seconds": starts, "moves_ms": moves, "rapid": rapid}

    table = Table("what", "measured", "wanted")
    table.add_row(f"command's start to the first picture, median of {len(starts)}", f"{statistics.median(starts):.2f} s", "under 3 s")
    for name, what in (("first", "the first panel"), ("all", "all panels")):
        one = moves[name]
        table.add_row(f"a move to the coarse answer of {what}, median of {len(one['all'])}", f"{one['median']:.0f} ms", "under 300 ms")
    for one in rapid:
        memory = f"{one['memory_before_mb']:.0f} to {one['memory_after_mb']:.0f} MB"
        table.add_row(
            f"{options.rapid} rapid moves, then closed: seconds until nothing runs", f"{one['seconds_until_quiet']:.2f} s, {memory}", ""
        )
    table.add_row("load of the machine, before and after", f"{load:.1f}, {result['load_after']:.1f}", "0")
    Console(width=120).print(table)
    report(options.out, result)


if __name__ == "__main__":
    main()
