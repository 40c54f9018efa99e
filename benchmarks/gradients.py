"""How fast is `backpropagate`? Against explicit weights with autograd, at Figure 1's setting.

    python benchmarks/gradients.py [--out FILE]

Explicit weights are the common way: for each sample and layer five n x n matrices of normals, drawn into buffers that are allocated once,
and autograd for the gradients of tokens and weights. Both sides have the same dtype and the same generator of random numbers. Explicit
networks run one by one and four at once, and the faster way counts. One thread on the CPU. All are timed in turn, by the CPU's time, and
medians are reported, so that a busy machine disturbs both sides alike. Fewer samples than the figure's 4,096 are timed: the cost is that of
a block of samples.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import report
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call

import shaped
from shaped.randomness import Stream

N, D, M, SAMPLES, OUTPUTS = 200, 150, 4, 4096, 10
GAMMA = 8**-0.5
BLOCK = shaped.ShapedAttention(GAMMA) >> shaped.ShapedFeedForward(GAMMA)
V0 = shaped.equicorrelated(M, 0.2)


def find_loss(outputs: Tensor) -> Tensor:
    labels = torch.zeros(len(outputs) * outputs.shape[1], dtype=torch.long, device=outputs.device)
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels, reduction="none").unflatten(0, outputs.shape[:2]).mean(-1)


def make_explicit(dtype: torch.dtype, batch: int, layers: int = 10) -> Callable[[], None]:
    """Draws networks with explicit weights and computes their gradients, forward and backward."""
    stream = Stream(0, 0, dtype=dtype, device=torch.device("cpu"))
    module = BLOCK.module(N, dtype=dtype)
    shape = (batch, N, N) if batch > 1 else (N, N)  # products with one matrix are faster without a batch
    weights = [{name: torch.empty(shape, dtype=dtype) for name, _ in module.named_parameters()} for _ in range(layers)]
    readout = torch.empty(*shape[:-1], OUTPUTS, dtype=dtype)
    flat = [matrix for layer in weights for matrix in layer.values()]
    X = stream.normal(batch, M, N).requires_grad_()

    def work() -> None:
        for matrix in (readout, *flat):
            stream.fill(matrix.requires_grad_(False))
        x = X
        for matrix in flat:
            matrix.requires_grad_()
        for layer in weights:
            x = functional_call(module, layer, (x,))
        gradients = torch.autograd.grad(find_loss(x @ readout / N**0.5).sum(), [X, *flat])
        torch.stack([gradient.square().sum((-2, -1)).sum() for gradient in gradients])

    return work


def make_ours(dtype: torch.dtype, samples: int) -> Callable[[], None]:
    def work() -> None:
        shaped.backpropagate(BLOCK, V0, n=N, d=D, outputs=OUTPUTS, loss=find_loss, samples=samples, seed=0, dtype=dtype, progress=False)

    return work


def time_in_turn(works: dict[str, tuple[Callable[[], None], int]], repeats: int) -> dict[str, float]:
    """Medians of the CPU's seconds, each divided by its number of samples and layers."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(1 + repeats):
        for name, (work, share) in works.items():
            began = time.process_time()
            work()
            if turn:  # the first is for warming up
                times[name].append((time.process_time() - began) / share)
    return {name: statistics.median(found) for name, found in times.items()}


def time_wide(n: int = 4096, d: int = 96, m: int = 8) -> float:
    """Seconds for one wide network."""
    began = time.perf_counter()
    V0 = shaped.equicorrelated(m, 0.2)
    shaped.backpropagate(BLOCK, V0, n=n, d=d, outputs=OUTPUTS, loss=find_loss, samples=1, seed=0, dtype=torch.float32, progress=False)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/gradients.json"))
    parser.add_argument("--samples", type=int, default=1222)  # two full blocks of float32
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"setting": {"n": N, "d": D, "m": M, "samples": options.samples}}
    table = Table("what", "measured", "wanted")
    for dtype in (torch.float32, torch.float64):
        found = time_in_turn(
            {
                "one": (make_explicit(dtype, 1), 10),
                "four": (make_explicit(dtype, 4), 4 * 10),
                "ours": (make_ours(dtype, options.samples), options.samples * D),
            },
            options.repeats,
        )
        name, explicit, ours = str(dtype).removeprefix("torch."), min(found["one"], found["four"]), found["ours"]
        us = {f"{key}_us": 1e6 * seconds for key, seconds in found.items()}
        result[name] = us | {"ratio": explicit / ours, "seconds_for_the_figure": ours * SAMPLES * D}
        times = f"{1e6 * explicit:.0f} / {1e6 * ours:.1f} µs a sample and layer"
        table.add_row(f"explicit weights / backpropagate, {name}", f"{explicit / ours:.0f}  ({times})", "at least 50")
    result["seconds_of_a_wide_network"] = time_wide()
    table.add_row("one network, n = 4096, d = 96, 8 tokens", f"{result['seconds_of_a_wide_network']:.1f} s", "seconds")
    result["peak_memory_GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    table.add_row("peak memory", f"{result['peak_memory_GiB']:.2f} GiB", "")
    Console(width=140).print(table)
    report(options.out, result)


if __name__ == "__main__":
    main()
