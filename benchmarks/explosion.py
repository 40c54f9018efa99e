"""Shares of exploding paths with and without QK-norm: the table of docs/method.md.

    python benchmarks/explosion.py [--samples 4096] [--out FILE]

gamma = 0.9, tau0 = 0.1, V0 = 100·I, 4 tokens, T = 1. Each share comes with its 95 % interval.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import report

import shaped
from shaped.intervals import format_share, share_interval

SEED, FAR = 1, 1e12
V0 = 100.0 * torch.eye(4, dtype=torch.float64)


def count_exploding(qk_norm: bool, samples: int, width: int | None = None, upper: float | None = None) -> dict[str, Any]:
    """The share of stopped paths of the SDE, or of networks of this width and depth."""
    layer = shaped.ShapedAttention(0.9, 0.1, qk_norm=qk_norm)
    how: dict[str, Any] = {"samples": samples, "seed": SEED, "record": "last", "upper": upper, "progress": False}
    paths = shaped.solve(layer, V0, T=1.0, check=False, **how) if width is None else shaped.propagate(layer, V0, n=width, d=width, **how)
    stopped = int(paths.stopped.isfinite().sum())
    low, high = share_interval(stopped, samples)
    return {"qk_norm": qk_norm, "width": width, "upper": upper, "stopped": stopped, "share": stopped / samples, "low": low, "high": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/explosion.json"))
    given = parser.parse_args()
    rows = []
    for width, upper in ((None, None), (64, FAR), (256, FAR), (None, FAR)):
        for qk_norm in (False, True):
            row = count_exploding(qk_norm, given.samples, width, upper)
            name = "SDE" if width is None else f"networks of width and depth {width}"
            past = "explode" if upper is None else f"past {upper:g}"
            norm = "with" if qk_norm else "without"
            print(f"{name}, {past}, {norm} QK-norm: {format_share(row['share'], given.samples)}", flush=True)
            rows.append(row)
    report(given.out, {"samples": given.samples, "seed": SEED, "rows": rows})


if __name__ == "__main__":
    main()
