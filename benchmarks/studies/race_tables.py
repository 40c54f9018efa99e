"""The tables of docs/race.md, from the runs in docs/results.

python benchmarks/studies/race_tables.py [--runs FOLDER] [--write]
"""

from __future__ import annotations

import argparse
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from race import (
    ARMS,
    FINAL,
    LONG,
    RATES,
    RESULTS,
    TOKENS,
    TUNING,
    Missing,
    find_loss,
    read_choices,
    read_known,
    read_loss,
    set_rate,
    tune,
)
from scipy import stats

from shaped.figures.harness.claims import mean_interval
from shaped.files import write_atomically
from shaped.train.run_records import RunRecord

MOST_CHOICES = max(len(arm.choices) for arm in ARMS.values())


def make_tables(known: dict[str, RunRecord]) -> str:
    """Markdown: losses by learning rate with the sensitivity, the free choices, the runs of the finals' length, the lead."""
    rates = sorted({float(name.removeprefix(f"{arm}-")) for arm in ARMS for name in known if is_rate(name.removeprefix(f"{arm}-"))})
    by_rate = [_format_rates(known, name, rates) for name in ARMS]
    by_choice = [_format_choices(known, name) for name in ARMS]
    heads = (
        ["arm", *(f"{rate:g}" for rate in rates), "sensitivity"],
        ["arm", *(f"choice {k}" for k in range(1, 1 + MOST_CHOICES)), "rates again", "tuned settings"],
    )
    groups = group_long_runs(known)
    tables = [*zip(heads, (by_rate, by_choice), strict=True), (LONG_RUNS, _format_long_runs(groups)), (LEAD, [format_lead(groups)])]
    return "\n\n".join(format_table(head, list(filter(None, rows))) for head, rows in tables)


LONG_RUNS = ["arm", "settings", "seeds", "test loss", "95 % interval", "ms a step"]
LEAD = ["best shaped arm", "best normalised arm", "seeds", "lead", "95 % interval of the lead"]


@dataclass(frozen=True)
class LongRuns:
    """The runs of the finals' length of one arm with one choice of settings, those of the tuning apart."""

    arm: str
    settings: str
    is_tuning: bool
    runs: list[RunRecord]

    @property
    def losses(self) -> list[float]:
        return [read_loss(run) for run in self.runs]

    @property
    def mean(self) -> float:
        return statistics.mean(self.losses)


def group_long_runs(known: dict[str, RunRecord]) -> list[LongRuns]:
    """The lowest mean first."""
    groups: dict[tuple[str, str, bool], list[RunRecord]] = {}
    for name, run in known.items():
        if run.settings["steps"] == FINAL["steps"] and (run.result is not None or run.why):
            arm = max((arm for arm in ARMS if name.startswith(f"{arm}-")), key=len)
            is_tuning = run.settings["seed"] == LONG["seed"]
            groups.setdefault((arm, format_settings(read_choices(run)), is_tuning), []).append(run)
    return sorted((LongRuns(*key, runs) for key, runs in groups.items()), key=lambda group: group.mean)


def _format_long_runs(groups: list[LongRuns]) -> list[list[str]]:
    rows = []
    for group in groups:
        seeds = "0 (tuning)" if group.is_tuning else _format_seeds(group)
        pace = statistics.median(milliseconds_a_step(run) for run in group.runs)
        rows.append([f"`{group.arm}`", group.settings, seeds, f"{group.mean:.3f}", format_interval(group.losses), f"{pace:.2f}"])
    return rows


def _format_seeds(group: LongRuns) -> str:
    return ", ".join(str(run.settings["seed"]) for run in group.runs)


def find_lead(groups: list[LongRuns]) -> tuple[LongRuns, LongRuns, float, tuple[float, float]]:
    """The best shaped and the best normalised finals, by how much the first is lower, and the 95 % interval of that (Welch)."""
    finals = [group for group in groups if not group.is_tuning and len(group.runs) > 1]
    shaped, normalised = (
        next(group for group in finals if ("model" in ARMS[group.arm].settings) is is_baseline) for is_baseline in (False, True)
    )
    interval = stats.ttest_ind(normalised.losses, shaped.losses, equal_var=False).confidence_interval(0.95)
    return shaped, normalised, normalised.mean - shaped.mean, (float(interval.low), float(interval.high))


def format_lead(groups: list[LongRuns]) -> list[str]:
    """The row of a table with the columns LEAD."""
    shaped, normalised, lead, (low, high) = find_lead(groups)
    seeds = f"{_format_seeds(shaped)} against {_format_seeds(normalised)}"
    return [f"`{shaped.arm}`", f"`{normalised.arm}`", seeds, f"{lead:.3f}", f"{low:.3f} to {high:.3f}"]


def format_interval(losses: list[float]) -> str:
    """Of the mean, at 95 % (Student)."""
    _, (low, high) = mean_interval(np.array(losses))
    return "one seed" if len(losses) == 1 else f"{low:.3f} to {high:.3f}"


def format_table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([first, f"|{'---|' * len(head)}", *others])


def write_tables(page: Path, tables: str) -> None:
    """Puts each table in the place of the one whose first and last columns have the same names."""
    text = page.read_text(encoding="utf-8")
    for table in tables.split("\n\n"):
        _, first, *_, last, _ = table.splitlines()[0].split("|")
        found = list(re.finditer(rf"^\|{re.escape(first)}\|.*\|{re.escape(last)}\|\n(?:\|.*\n)*", text, re.MULTILINE))
        if len(found) != 1:
            raise ValueError(f"{page} must have one table with the columns{first}to{last.rstrip()}, got {len(found)}")
        text = text[: found[0].start()] + table + "\n" + text[found[0].end() :]
    write_atomically(page, lambda file: file.write(text.encode()))


def milliseconds_a_step(run: RunRecord, tokens: int = TOKENS) -> float:
    """The median over the run, which leaves out compilation and evaluation."""
    rates = [line["tokens_per_second"] for line in run.metrics if line["kind"] == "train"]
    return 1e3 * run.settings["batch"] * tokens / statistics.median(rates)


def _format_rates(known: dict[str, RunRecord], name: str, rates: list[float]) -> list[str]:
    losses = {rate: find_loss(known, f"{name}-{rate:g}", TUNING | set_rate(ARMS[name].settings, rate)) for rate in rates}
    made = [loss for loss in losses.values() if loss is not None]
    if not made:
        return []
    common = [loss for rate in RATES if (loss := losses.get(rate)) is not None]
    cells = ["" if loss is None else f"**{loss:.3f}**" if loss == min(made) else f"{loss:.3f}" for loss in losses.values()]
    return [f"`{name}`", *cells, f"{statistics.mean(common) - min(common):.3f}" if len(common) == len(RATES) else ""]


def _format_choices(known: dict[str, RunRecord], name: str) -> list[str]:
    cells, again = list[str](), list[str]()

    def look_up(run: str, settings: dict[str, Any]) -> float:
        loss = find_loss(known, run, TUNING | settings)
        if loss is None:
            raise Missing(run)
        label = run.removeprefix(f"{name}-")
        if label.startswith("again-"):
            again.append(f"{label.removeprefix('again-')} {loss:.3f}")
        elif not is_rate(label):
            cells.append(f"{ARMS[name].choices[len(cells)][0]} {loss:.3f}")
        return loss

    try:
        tuned = {key: value for key, value in tune(name, look_up).items() if key not in ARMS[name].settings}
        chosen = format_settings(tuned)
    except Missing:
        chosen = "not finished"
    return [f"`{name}`", *cells, *[""] * (MOST_CHOICES - len(cells)), ", ".join(again), chosen] if cells else []


def format_settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {value:.4g}" if isinstance(value, float) else f"{key} = {value}" for key, value in settings.items())


def is_rate(text: str) -> bool:
    return text.replace(".", "", 1).replace("e-", "", 1).isdigit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="folders with more runs")
    parser.add_argument("--write", action="store_true", help="into docs/race.md")
    given = parser.parse_args()
    tables = make_tables(read_known(*given.runs))
    print(tables)
    if given.write:
        write_tables(RESULTS.parent / "race.md", tables)


if __name__ == "__main__":
    main()
