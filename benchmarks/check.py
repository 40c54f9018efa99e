"""The benchmark gate: no ratio may be more than 10 % above the committed one.

    python benchmarks/check.py            # compares with docs/results/benchmark-check.json; exit code 1 if a ratio is worse
    python benchmarks/check.py --write    # commits new ratios, after a change that is meant to be slower or faster

Each ratio is our time over a reference's time, for the same work in the same run, on one thread of the CPU; lower is better. Both sides run
in turns, and each side counts with the CPU time of its fastest run: noise only adds time. A ratio that looks worse gets more turns.
Not compared, since they depend on the machine: seconds, memory, more than one thread, GPUs, training steps. They are in docs/results.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attention
import finite
import limit
import torch
from common import environment, report

COMMITTED = Path(__file__).parent.parent / "docs" / "results" / "benchmark-check.json"
TOLERANCE, TURNS, MOST_TURNS = 1.1, 8, 64
Work = Callable[[], object]


class Ratio:
    """Our time over the reference's. `per` scales the two to the same amount of work."""

    def __init__(self, ours: Work, reference: Work, per: float = 1.0):
        self.works, self.per = (ours, reference), per
        self.fastest = [math.inf, math.inf]
        for work in self.works:
            work()  # warm up

    def measure(self, turns: int) -> float:
        for _ in range(turns):
            for side, work in enumerate(self.works):
                began = time.process_time()
                work()
                self.fastest[side] = min(self.fastest[side], time.process_time() - began)
        return self.per * self.fastest[0] / self.fastest[1]


def compare_with_torchsde(m: int) -> Ratio:
    many, few = 2**15 // m**2, max(8, 2048 // m**2)
    return Ratio(partial(limit.run_solve, m, many, 5), partial(limit.run_torchsde, m, "cholesky", few, 5), few / many)


def compare_with_normals() -> Ratio:
    """Four tokens take 32 normals a step and sample."""
    generator, size = torch.Generator().manual_seed(0), 4096 * 32 * 10
    return Ratio(partial(limit.run_solve, 4, 4096, 10), lambda: torch.randn(size, dtype=torch.float64, generator=generator))


def compare_with_weights(dtype: torch.dtype) -> Ratio:
    samples, layers = 1024, 10
    ours = partial(finite.run_propagate, samples, layers, "cpu", dtype)
    return Ratio(ours, finite.prepare_explicit(4, 4, "cpu"), 4 * 4 / (samples * layers))


def compare_with_plain_attention(m: int, causal: bool) -> Ratio:
    inputs = [torch.randn(2048 // m, 4, m, 64, requires_grad=True) for _ in range(3)]
    ours, reference = (attention.measured(form, inputs, causal, None, True) for form in (attention.shaped, attention.plain))
    return Ratio(ours, reference)


RATIOS: dict[str, Callable[[], Ratio]] = {
    "solve, m = 4 / torch.randn of its normals": compare_with_normals,
    "solve / torchsde with a Cholesky root, m = 4": partial(compare_with_torchsde, 4),
    "solve / torchsde with a Cholesky root, m = 12": partial(compare_with_torchsde, 12),
    "solve, m = 128 / m = 32, a sample": lambda: Ratio(partial(limit.run_solve, 128, 4, 5), partial(limit.run_solve, 32, 64, 5), 16.0),
    "propagate in float32 / explicit weights": partial(compare_with_weights, torch.float32),
    "propagate in float64 / explicit weights": partial(compare_with_weights, torch.float64),
    "propagate, attention only, n = 10^6 / n = 10^3": lambda: Ratio(
        partial(finite.run_attention_only, 10**6, 10), partial(finite.run_attention_only, 10**3, 10)
    ),
    "shaped / plain attention, 512 tokens, full": partial(compare_with_plain_attention, 512, False),
    "shaped / plain attention, 512 tokens, causal": partial(compare_with_plain_attention, 512, True),
    "shaped / plain attention, 2048 tokens, causal": partial(compare_with_plain_attention, 2048, True),
}


def measure(name: str, committed: float | None) -> tuple[float, int]:
    """The ratio, and the turns it took."""
    ratio, turns = RATIOS[name](), TURNS
    found = ratio.measure(turns)
    most = 4 * TURNS if committed is None else MOST_TURNS
    while turns < most and (committed is None or found > TOLERANCE * committed):
        found, turns = ratio.measure(TURNS), turns + TURNS
    return found, turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the ratios in place of comparing them")
    write = parser.parse_args().write
    torch.set_num_threads(1)
    torch.manual_seed(0)
    about = {} if write else json.loads(COMMITTED.read_text())
    committed: dict[str, float] = about.get("ratios", {})
    here, there = environment()["processor"], about.get("environment", {}).get("processor")
    if not write and here != there:
        print(f"the committed ratios are from {there}, this is {here}: a difference may be the processor's")
    ratios, worse = {}, []
    for name in RATIOS:
        if not write and name not in committed:
            sys.exit(f"{COMMITTED.name} must have {name!r}: run `python benchmarks/check.py --write`")
        ratios[name], turns = measure(name, committed.get(name))
        before = f", committed {committed[name]:.4g}: {100 * (ratios[name] / committed[name] - 1):+.0f} %" if not write else ""
        print(f"{name}: {ratios[name]:.4g}{before} ({turns} turns)", flush=True)
        if not write and ratios[name] > TOLERANCE * committed[name]:
            worse.append(name)
    if write:
        report(COMMITTED, {"ratios": ratios})
    if worse:
        sys.exit(f"more than 10 % worse: {'; '.join(worse)}")


if __name__ == "__main__":
    main()
