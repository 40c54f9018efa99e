"""The tables of verdicts.py: how well the risk at initialisation tells which models do not train, and what it misses.

    python benchmarks/studies/verdict_tables.py docs/results/verdicts.json

prints those of a finished study.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from roc import auc_interval, measure_auc

from shaped.files import read_json

AT_RISK = 0.5
Records = list[dict[str, Any]]


def make_tables(records: Records) -> dict[str, Any]:
    """Of what `examine` returned, one record a model."""
    kinds = list(dict.fromkeys(record["setting"]["kind"] for record in records))
    by_kind = {kind: summarise([record for record in records if record["setting"]["kind"] == kind]) for kind in kinds}
    names = list(records[0]["quantities"])
    return {
        "all": summarise(records),
        "attends": summarise(records, "attends"),
        "kinds": by_kind,
        "quantities": {name: rank(records, (record["quantities"][name] for record in records)) for name in names},
        "missed": [describe(record) for record in records if not record["trains"] and record["risk"] < AT_RISK],
        "false_alarms": [describe(record) for record in records if record["trains"] and record["risk"] >= AT_RISK],
    }


def summarise(records: Records, outcome: str = "trains") -> dict[str, Any]:
    """The area under the curve, and the four counts at the threshold of the rules."""
    fail, train = ([record["risk"] >= AT_RISK for record in records if record[outcome] is well] for well in (False, True))
    counts = {"found": sum(fail), "missed": len(fail) - sum(fail), "false_alarms": sum(train), "rightly_silent": len(train) - sum(train)}
    return {"models": len(records), "fail": len(fail)} | rank(records, (record["risk"] for record in records), outcome) | counts


def rank(records: Records, scores: Iterable[float | None], outcome: str = "trains") -> dict[str, float | None]:
    """The area with its interval. A score that is not finite ranks above all others."""
    fails = [not record[outcome] for record in records]
    auc = measure_auc([math.inf if score is None else score for score in scores], fails)
    low, high = auc_interval(auc, sum(fails), len(fails) - sum(fails))
    return {name: None if math.isnan(value) else value for name, value in (("auc", auc), ("low", low), ("high", high))}


def describe(record: dict[str, Any]) -> dict[str, Any]:
    return record["setting"] | {name: record[name] for name in ("risk", "verdicts", "best_loss")}


def print_tables(tables: dict[str, Any]) -> None:
    print("\n| kind | models | do not train | area under the curve | found | missed | false alarms |\n|---|---|---|---|---|---|---|")
    for kind, row in (tables["kinds"] | {"all": tables["all"], "all; do not learn to attend": tables["attends"]}).items():
        counts = f"{row['found']} | {row['missed']} | {row['false_alarms']}"
        print(f"| {kind} | {row['models']} | {row['fail']} | {format_area(row)} | {counts} |")
    print("\n| one quantity alone | area under the curve |\n|---|---|")
    for name, row in sorted(tables["quantities"].items(), key=lambda entry: -(entry[1]["auc"] or 0.0)):
        print(f"| {name} | {format_area(row)} |")
    for title, name in (("Low risk, but does not train", "missed"), ("High risk, but trains", "false_alarms")):
        print(f"\n{title}:")
        for row in sorted(tables[name], key=lambda row: row["kind"]):
            print(f"- {format_model(row)}")


def format_area(row: dict[str, Any]) -> str:
    return "one outcome only" if row["auc"] is None else f"{row['auc']:.3f} ({row['low']:.3f} to {row['high']:.3f})"


def format_model(row: dict[str, Any]) -> str:
    drawn = ", ".join(f"{name} {row[name]:.2g}" for name in ("gamma", "scale", "qk_scale") if row[name] is not None)
    loss = "not finite" if row["best_loss"] is None else f"{row['best_loss']:.2f}"
    return (
        f"{row['kind']}, depth {row['depth']}, {drawn}: risk {row['risk']:.2f} ({', '.join(row['verdicts']) or 'no verdict'}), loss {loss}"
    )


if __name__ == "__main__":
    print_tables(make_tables(read_json(Path(sys.argv[1]), models=list)["models"]))
