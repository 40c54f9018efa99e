"""Are the answers of `shaped.advise` right? Fresh networks, with other seeds, where it says safe and where it says unsafe.

python benchmarks/studies/advice.py --device cuda --out docs/results/advice-h200.json
python benchmarks/studies/advice.py --only aligned,unmasked --networks 4096
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from common import environment

import shaped
from shaped.advice.measurement import Ledger, Place
from shaped.advice.rows import Row
from shaped.files import write_json
from shaped.workers import open_executor

SETTINGS: dict[str, dict[str, Any]] = {
    "usual temperature": {"n": 512, "d": 96, "m": 128, "heads": 8, "tau0": 512**-0.5},
    "between": {"n": 512, "d": 96, "m": 128, "heads": 8, "tau0": 512**-0.25},
    "aligned": {"n": 64, "d": 128, "m": 16, "heads": 4, "tau0": 1.0},
    "unmasked": {"n": 64, "d": 96, "m": 8, "heads": 2, "tau0": 0.3, "mask": None},
    "qk-norm": {"n": 64, "d": 64, "m": 16, "heads": 4, "tau0": 0.1, "qk_norm": True},
    "strict": {"n": 128, "d": 64, "m": 16, "heads": 4, "tau0": 0.1, "share": 0.02, "correlation": 0.8, "growth": 4.0},
}
FRESH = 10**6
"""Is added to the seed of the search."""


def confirm(row: Row | None, advice: shaped.Advice, networks: int, seed: int, where: dict[str, Any]) -> dict[str, Any] | None:
    """Fresh networks at the place of a row."""
    if row is None:
        return None
    ledger = Ledger(advice.question, seed + FRESH, progress=False, **where)
    fresh = ledger.search(Place("network", row.gamma, row.tau0), networks)
    found = {"said": advice.judge(row), "before": [row.failed, row.count], "fresh": [fresh.failed, fresh.count]}
    return {"gamma": row.gamma, "tau0": row.tau0} | found | {"interval": fresh.interval, "verdict": advice.judge(fresh)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--networks", type=int, default=4096)
    parser.add_argument("--samples", type=int, help="most networks at a place in the search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help=f"some of {', '.join(SETTINGS)}", default=",".join(SETTINGS))
    parser.add_argument("--out", type=Path, default=Path("out/advice.json"))
    given = parser.parse_args()
    chosen = given.only.split(",")
    if unknown := set(chosen) - set(SETTINGS):
        parser.error(f"only must be some of {', '.join(SETTINGS)}, got {', '.join(unknown)}")
    command = f"python benchmarks/studies/advice.py {' '.join(sys.argv[1:])}".strip()
    result: dict[str, Any] = {"command": command, "environment": environment(), "settings": {}}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with open_executor(given.workers, None) as executor:
        where = {"device": given.device, "executor": executor}
        for name in chosen:
            began = time.perf_counter()
            advice = shaped.advise(**SETTINGS[name], samples=given.samples, seed=given.seed, progress=False, **where)
            searched = time.perf_counter() - began
            # The next gamma, and the smallest that was proved to be unsafe if that is another.
            rows = {"best": advice.best, "above": advice.answer.above, "unsafe": advice.answer.unsafe}
            fresh = {key: confirm(row, advice, given.networks, given.seed, where) for key, row in rows.items()}
            differ = {key: one["verdict"] for key, one in fresh.items() if one and one["said"] not in ("open", one["verdict"])}
            wrong = [key for key, verdict in differ.items() if verdict != "open"]
            entry = {"setting": SETTINGS[name], "answer": advice.sentence, "proved": advice.proved, "fresh": fresh}
            entry |= {"wrong": wrong, "undecided": sorted(set(differ) - set(wrong))}
            result["settings"][name] = entry | {"search_seconds": searched, "seconds": time.perf_counter() - began}
            write_json(given.out, result)
            print(f"{name}: {advice.sentence}")
            for key, one in fresh.items():
                if one is not None:
                    failed, count = one["fresh"]
                    print(f"  {key}: gamma {one['gamma']:.3g}, said {one['said']}, {failed} of {count} fresh fail: {one['verdict']}")
            words = f"WRONG: {', '.join(wrong)}" if wrong else "fresh networks do not decide it" if differ else "confirmed"
            print(f"  {words}; {searched:.0f} s for the search", flush=True)
    print(f"written: {given.out} ({torch.cuda.get_device_name() if given.device != 'cpu' else 'CPU'})")
    sys.exit(any(entry["wrong"] for entry in result["settings"].values()))


if __name__ == "__main__":
    main()
