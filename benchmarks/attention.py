"""Shaped attention against plain scaled_dot_product_attention and against the materialised matrix: time and peak memory.

    python benchmarks/attention.py [--masks] [--out FILE]

On a GPU in bf16, 16 heads of 64 features, 32,768 tokens in sequences of length m; on a CPU in float32, 4 heads and 8,192 tokens. All forms
are timed in turns in one run; medians. `--masks`: under masks of several kinds at 1,024 tokens, against plain attention under the same.
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
MASKS = ("padding", "causal, padding", "boolean", "bias")
Form = Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    if mask is None or not causal:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    m = q.shape[-2]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask & torch.ones(m, m, dtype=torch.bool, device=q.device).tril())


def shaped(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    return shaped_attention(q, k, v, is_causal=causal, attn_mask=mask)


def masked(kind: str, q: Tensor) -> Tensor | None:
    """Padding of up to half a sequence; any key for a query, but for a quarter of them; a bias on the logits."""
    batch, _, m, _ = q.shape
    if "padding" in kind:
        return (torch.arange(m, device=q.device) < torch.randint(m // 2, m, (batch, 1), device=q.device))[:, None, None, :]
    if kind == "boolean":
        return torch.rand(batch, 1, m, m, device=q.device) < 0.75
    return torch.randn(1, 1, m, m, device=q.device, dtype=q.dtype) if kind == "bias" else None


def materialised(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    m = q.shape[-2]
    bias = torch.zeros(m, m, dtype=q.dtype, device=q.device)
    if causal:
        bias.masked_fill_(~torch.ones_like(bias).tril().bool(), -math.inf)
    return attention_matrix(q @ k.mT * q.shape[-1] ** -0.5, bias) @ v


def forms(gpu: bool, masks: bool) -> dict[str, Form]:
    made: dict[str, Form] = {"plain": plain, "shaped": shaped} | ({} if masks else {"materialised": materialised})
    if gpu:
        made["shaped, compiled"] = torch.compile(shaped, dynamic=False)
    return made


def measured(form: Form, inputs: list[Tensor], causal: bool, mask: Tensor | None, backward: bool) -> Callable[[], None]:
    weight = torch.randn_like(inputs[0])

    def work() -> None:
        output = form(inputs[0], inputs[1], inputs[2], causal, mask)
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
    parser.add_argument("--masks", action="store_true", help="masks of several kinds in place of several lengths")
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    device, dtype, heads, tokens = ("cuda", torch.bfloat16, 16, 2**15) if gpu else ("cpu", torch.float32, 4, 2**13)
    torch._dynamo.config.recompile_limit = 64  # one for each length, mask and pass
    rows = []
    for m in (1024,) if arguments.masks else [m for m in LENGTHS if m <= tokens]:
        for kind in MASKS if arguments.masks else ("full", "causal"):
            for backward in (False, True):
                shape = (tokens // m, heads, m, 64)
                inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=backward) for _ in range(3)]
                causal, mask = "causal" in kind, masked(kind, inputs[0])
                works = {name: measured(form, inputs, causal, mask, backward) for name, form in forms(gpu, arguments.masks).items()}
                if m > 2048 and not gpu:
                    del works["materialised"]
                for work in works.values():
                    for _ in range(3 if gpu else 1):
                        work()
                times: dict[str, list[float]] = {name: [] for name in works}
                for _ in range(15 if gpu else 5):
                    for name, work in works.items():
                        times[name].append(seconds(work, gpu))
                row: dict[str, Any] = {"tokens": m, "mask": kind, "pass": "both" if backward else "forward"}
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
        used = ", ".join(f"{memory[name]:.0f}" for name in memory if name != "shaped, compiled") if memory else "–"
        table.add_row(str(row["tokens"]), row["mask"], row["pass"], *cells, ratio, compiled, used)
    Console(width=170).print(table)
    report(arguments.out, {"rows": rows})


if __name__ == "__main__":
    main()
