"""Shaped attention against plain scaled_dot_product_attention and against the materialised matrix: time and peak memory.

    python benchmarks/attention.py [--out FILE]

On a GPU in bf16, 16 heads of 64 features, 32,768 tokens in sequences of length m; on a CPU in float32, 4 heads and 8,192 tokens. All forms
are timed in turns in one run; medians.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import report
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shaped.nn.functional import attention_matrix, shaped_attention

LENGTHS = (128, 512, 2048, 8192)
Form = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=causal)


def shaped(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return shaped_attention(q, k, v, is_causal=causal)


def materialised(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    m = q.shape[-2]
    bias = torch.zeros(m, m, dtype=q.dtype, device=q.device)
    if causal:
        bias.masked_fill_(~torch.ones_like(bias).tril().bool(), -math.inf)
    return attention_matrix(q @ k.mT * q.shape[-1] ** -0.5, bias) @ v


def forms(gpu: bool) -> dict[str, Form]:
    made: dict[str, Form] = {"plain": plain, "shaped": shaped, "materialised": materialised}
    if gpu:
        made["shaped, compiled"] = torch.compile(shaped, dynamic=False)
    return made


def measured(form: Form, inputs: list[Tensor], causal: bool, backward: bool) -> Callable[[], None]:
    weight = torch.randn_like(inputs[0])

    def work() -> None:
        output = form(inputs[0], inputs[1], inputs[2], causal)
        if backward:
            torch.autograd.grad(output, inputs, weight)

    return work


def seconds(work: Callable[[], None], gpu: bool) -> float:
    if not gpu:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    # Several calls at a time, so that what the host does between them does not count.
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e4


def peak_memory(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/attention.json"))
    out = parser.parse_args().out
    gpu = torch.cuda.is_available()
    device, dtype, heads, tokens = ("cuda", torch.bfloat16, 16, 2**15) if gpu else ("cpu", torch.float32, 4, 2**13)
    torch._dynamo.config.recompile_limit = 64  # one for each length, mask and pass
    rows = []
    for m in [m for m in LENGTHS if m <= tokens]:
        for causal in (False, True):
            for backward in (False, True):
                shape = (tokens // m, heads, m, 64)
                inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=backward) for _ in range(3)]
                works = {name: measured(form, inputs, causal, backward) for name, form in forms(gpu).items()}
                if m > 2048 and not gpu:
                    del works["materialised"]
                for work in works.values():
                    for _ in range(3 if gpu else 1):
                        work()
                times: dict[str, list[float]] = {name: [] for name in works}
                for _ in range(15 if gpu else 5):
                    for name, work in works.items():
                        times[name].append(seconds(work, gpu))
                row: dict[str, Any] = {"tokens": m, "mask": "causal" if causal else "full", "pass": "both" if backward else "forward"}
                row["ms"] = {name: 1e3 * statistics.median(values) for name, values in times.items()}
                if gpu:
                    row["MiB"] = {name: peak_memory(work) for name, work in works.items()}
                rows.append(row)
    table = Table(
        "m", "mask", "pass", *(f"{name}, ms" for name in rows[0]["ms"]), "shaped/plain", "compiled/plain", "MiB plain, shaped, mat."
    )
    for row in rows:
        ms, memory = row["ms"], row.get("MiB", {})
        cells = [f"{ms[name]:.3f}" if name in ms else "–" for name in rows[0]["ms"]]
        ratio = f"{ms['shaped'] / ms['plain']:.2f}"
        compiled = f"{ms['shaped, compiled'] / ms['plain']:.2f}" if "shaped, compiled" in ms else "–"
        used = ", ".join(f"{memory[name]:.0f}" for name in ("plain", "shaped", "materialised")) if memory else "–"
        table.add_row(str(row["tokens"]), row["mask"], row["pass"], *cells, ratio, compiled, used)
    Console(width=170).print(table)
    report(out, {"rows": rows})


if __name__ == "__main__":
    main()
