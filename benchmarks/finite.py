"""How fast is `propagate`? Against explicit weights at Figure 1's setting, and as the width grows.

    python benchmarks/finite.py [--out FILE]

Explicit weights are the common way: for each sample and layer five n x n matrices of float32 normals, as in `block.module(n)`, here
drawn into buffers that are allocated once. They are timed on fewer samples. One thread on the CPU; medians throughout.
"""

from __future__ import annotations

import argparse
import math
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import median_seconds, report
from rich.console import Console
from rich.table import Table

import shaped
from shaped.nn.functional import attention_matrix, he_constant, shaped_relu

N, D, M, SAMPLES = 200, 150, 4, 4096
GAMMA = 8**-0.5
BLOCK = shaped.ShapedAttention(GAMMA) >> shaped.ShapedFeedForward(GAMMA)
V0 = shaped.equicorrelated(M, 0.2)


def prepare_explicit(samples: int, layers: int, device: str) -> Callable[[], None]:
    """Networks with explicit weights; on a GPU `samples` of them are computed side by side."""
    how: dict[str, Any] = {"device": device, "dtype": torch.float32}
    generator = torch.Generator(device).manual_seed(0)
    X = torch.randn(samples, M, N, generator=generator, **how)
    query, key, value, before, after = (torch.empty(samples, N, N, **how) for _ in range(5))
    scale, lam, negative = 1 / math.sqrt(N), math.sqrt(1 - GAMMA**2), 1 - 1 / math.sqrt(N)
    bias = torch.zeros(M, M, **how)

    def work() -> None:
        x = X
        for _ in range(layers):
            for weight in (query, key, value, before, after):
                weight.normal_(generator=generator)
            A = attention_matrix((x @ query) @ (x @ key).mT * (scale**2 / N), bias)
            x = lam * x + GAMMA * scale * (A @ x @ value)
            hidden = shaped_relu(x @ before * scale, negative)
            x = lam * x + GAMMA * math.sqrt(he_constant(negative) / N) * (hidden @ after)

    return work


def explicit(samples: int, layers: int, device: str) -> float:
    """Seconds for one sample and layer with explicit weights."""
    return median_seconds(prepare_explicit(samples, layers, device), repeats=5) / (samples * layers)


def run_propagate(samples: int, d: int, device: str, dtype: torch.dtype) -> None:
    shaped.propagate(BLOCK, V0, n=N, d=d, samples=samples, seed=0, record="last", device=device, dtype=dtype, progress=False)


def ours(device: str, dtype: torch.dtype, samples: int = SAMPLES, repeats: int = 3) -> float:
    """Seconds for one sample and layer."""
    return median_seconds(lambda: run_propagate(samples, D, device, dtype), repeats=repeats) / (samples * D)


def run_attention_only(n: int, d: int) -> None:
    shaped.propagate(shaped.ShapedAttention(GAMMA), V0, n=n, d=d, samples=SAMPLES, seed=0, record="last", progress=False)


def attention_at(n: int) -> float:
    return median_seconds(lambda: run_attention_only(n, D), repeats=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/finite.json"))
    out = parser.parse_args().out
    torch.set_num_threads(1)
    result: dict[str, Any] = {"setting": {"n": N, "d": D, "m": M, "samples": SAMPLES}}
    weights = explicit(8, 4, "cpu")
    on_cpu: dict[str, Any] = {"explicit_us": 1e6 * weights}
    result["cpu"] = on_cpu
    for dtype in (torch.float32, torch.float64):
        seconds = ours("cpu", dtype)
        name = str(dtype).removeprefix("torch.")
        on_cpu[name] = {"us": 1e6 * seconds, "ratio": weights / seconds, "seconds_for_the_figure": seconds * SAMPLES * D}
    result["peak_memory_GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    narrow, wide = attention_at(10**3), attention_at(10**6)
    result["attention_only"] = {"seconds_at_1e3": narrow, "seconds_at_1e6": wide, "ratio": wide / narrow}
    if torch.cuda.is_available():
        weights = explicit(512, 4, "cuda")
        on_gpu: dict[str, Any] = {"explicit_us": 1e6 * weights}
        result["gpu"] = on_gpu
        for dtype in (torch.float32, torch.float64):
            for samples in (SAMPLES, 16 * SAMPLES):
                seconds = ours("cuda", dtype, samples)
                name = f"{str(dtype).removeprefix('torch.')}, {samples} samples"
                on_gpu[name] = {"us": 1e6 * seconds, "ratio": weights / seconds, "seconds": seconds * samples * D}

    table = Table("what", "measured", "wanted")
    for where in ("cpu", "gpu"):
        for name, row in result.get(where, {}).items():
            if isinstance(row, dict):
                wanted = "at least 100, goal 200" if (where, name) == ("cpu", "float32") else ""
                times = f"{result[where]['explicit_us']:.2f} / {row['us']:.3f} µs a sample and layer"
                table.add_row(f"{where}: explicit float32 weights / propagate, {name}", f"{row['ratio']:.0f}  ({times})", wanted)
    table.add_row("attention only, n = 10⁶ / n = 10³", f"{result['attention_only']['ratio']:.2f}", "at most 1.2")
    table.add_row("peak memory, 4096 samples", f"{result['peak_memory_GiB']:.2f} GiB", "at most 2 GiB")
    Console(width=140).print(table)
    report(out, result)


if __name__ == "__main__":
    main()
