"""Is the solver's default step short enough? The law with it against that with 16 times as many steps.

    python benchmarks/steps.py [--tokens 4,16,128] [--samples 4096] [--device cpu] [--out FILE]

Mean and spread of the correlation over pairs of tokens, and the share of paths that stop, for causal and full attention of 8 heads with a
projection. Each is a difference in standard errors, z. Where the step can be seen, `solve` must have warned. Without any effect of the step
1 difference in 22 is beyond 2, and 1 in 2,000 beyond 3.5.
"""

from __future__ import annotations

import argparse
import itertools
import math
import warnings
from pathlib import Path
from typing import Any

from common import report
from rich.console import Console
from rich.table import Table

import shaped
from shaped.checks import parse_whole_numbers
from shaped.limit import default_steps
from shaped.stepping import moments, standard_error

T, FINER = 96 / 512, 16


def compare_steps(m: int, heads: int, gamma: float, tau0: float, mask: str | None, samples: int, device: str, seed: int) -> dict[str, Any]:
    layer = shaped.ShapedAttention(gamma, tau0, heads, project=True, mask=mask)
    V0, steps = shaped.equicorrelated(m, 0.2), default_steps(layer, m, T)
    how: dict[str, Any] = {"T": T, "samples": samples, "record": "last", "upper": 1e4, "device": device, "progress": False}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        coarse = shaped.solve(layer, V0, seed=seed, **how)
    fine = shaped.solve(layer, V0, steps=FINER * steps, seed=seed + 1, check=False, **how)
    row: dict[str, Any] = {
        "tokens": m,
        "heads": heads,
        "gamma": gamma,
        "tau0": tau0,
        "mask": mask or "full",
        "steps": steps,
        "samples": samples,
    }
    row["warned"] = any(issubclass(one.category, shaped.StepWarning) for one in caught)
    found, finer = (moments(paths.V[-1], paths.stopped > paths.t[-1]) for paths in (coarse, fine))
    for name, (value, influence) in found.items():
        other, second = finer[name]
        error = math.hypot(standard_error(influence), standard_error(second))
        row[name] = {"default": value, "finer": other, "error": error, "z": (value - other) / error if error else 0.0}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="4,16,128")
    parser.add_argument("--heads", type=int, default=8, help="with one head paths come back from far away, and take long")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/steps.json"))
    given = parser.parse_args()
    settings = itertools.product(parse_whole_numbers("tokens", given.tokens), (0.35, 0.5, 0.7), (0.25, 1.0), ("causal", None))
    table = Table("m", "gamma", "tau0", "mask", "steps", "mean of rho", "z", "spread", "z", "stopped", "z", "warned")
    rows = []
    for number, (m, gamma, tau0, mask) in enumerate(settings):
        row = compare_steps(m, given.heads, gamma, tau0, mask, given.samples, given.device, given.seed + 2 * number)
        cells = [str(m), f"{gamma:g}", f"{tau0:g}", row["mask"], str(row["steps"])]
        for name in ("rho_mean", "rho_spread", "stopped_share"):
            one = row[name]
            cells += [f"{one['default']:.4f} / {one['finer']:.4f}", f"{one['z']:+.1f}"]
        table.add_row(*cells, "yes" if row["warned"] else "")
        print(*cells, row["warned"], flush=True)
        rows.append(row)
    scores = [abs(row[name]["z"]) for row in rows for name in ("rho_mean", "rho_spread", "stopped_share") if not row["warned"]]
    beyond = {str(z): sum(score > z for score in scores) for z in (2.0, 3.5)}
    Console(width=160).print(table)
    print(f"{len(scores)} differences without a warning: {beyond['2.0']} beyond 2 standard errors, {beyond['3.5']} beyond 3.5")
    report(given.out, {"rows": rows, "differences": len(scores), "beyond": beyond})


if __name__ == "__main__":
    main()
