"""How fast is `backpropagate`? Against explicit weights with autograd, at Figure 1's setting.

    python benchmarks/gradients.py [--out FILE]

Explicit weights are the common way: for each sample and layer five n x n matrices of float32 normals, drawn into buffers that are
allocated once, and autograd for the gradients of tokens and weights. One thread on the CPU; medians throughout. Both are timed on fewer
samples than the figure's 4,096: their cost is that of a block of samples.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import torch
from common import median_seconds, report
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call

import shaped

N, D, M, SAMPLES, OUTPUTS = 200, 150, 4, 4096, 10
GAMMA = 8**-0.5
BLOCK = shaped.ShapedAttention(GAMMA) >> shaped.ShapedFeedForward(GAMMA)
V0 = shaped.equicorrelated(M, 0.2)


def find_loss(outputs: Tensor) -> Tensor:
    labels = torch.zeros(len(outputs) * outputs.shape[1], dtype=torch.long, device=outputs.device)
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels, reduction="none").unflatten(0, outputs.shape[:2]).mean(-1)


def explicit(layers: int, repeats: int = 5) -> float:
    """Seconds for one sample and layer with explicit weights, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    module = BLOCK.module(N)
    weights = [{name: torch.empty(N, N, requires_grad=True) for name, _ in module.named_parameters()} for _ in range(layers)]
    readout = torch.empty(N, OUTPUTS)
    X = torch.randn(1, M, N, generator=generator, requires_grad=True)

    def work() -> None:
        with torch.no_grad():
            for matrix in (readout, *(matrix for layer in weights for matrix in layer.values())):
                matrix.normal_(generator=generator)
        x = X
        for layer in weights:
            x = functional_call(module, layer, (x,))
        flat = [matrix for layer in weights for matrix in layer.values()]
        gradients = torch.autograd.grad(find_loss(x @ readout / N**0.5).sum(), [X, *flat])
        torch.stack([gradient.square().sum() for gradient in gradients])

    return median_seconds(work, repeats=repeats) / layers


def ours(dtype: torch.dtype, samples: int, repeats: int = 3, d: int = D) -> float:
    """Seconds for one sample and layer."""

    def work() -> None:
        shaped.backpropagate(BLOCK, V0, n=N, d=d, outputs=OUTPUTS, loss=find_loss, samples=samples, seed=0, dtype=dtype, progress=False)

    return median_seconds(work, repeats=repeats) / (samples * d)


def time_wide(n: int = 4096, d: int = 96, m: int = 8) -> float:
    """Seconds for one wide network."""
    began = time.perf_counter()
    V0 = shaped.equicorrelated(m, 0.2)
    shaped.backpropagate(BLOCK, V0, n=n, d=d, outputs=OUTPUTS, loss=find_loss, samples=1, seed=0, dtype=torch.float32, progress=False)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/gradients.json"))
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    weights = explicit(10, repeats=options.repeats)
    result: dict[str, Any] = {"setting": {"n": N, "d": D, "m": M, "samples": options.samples}, "explicit_us": 1e6 * weights}
    table = Table("what", "measured", "wanted")
    for dtype in (torch.float32, torch.float64):
        seconds, name = ours(dtype, options.samples, options.repeats), str(dtype).removeprefix("torch.")
        result[name] = {"us": 1e6 * seconds, "ratio": weights / seconds, "seconds_for_the_figure": seconds * SAMPLES * D}
        times = f"{1e6 * weights:.0f} / {1e6 * seconds:.1f} µs a sample and layer"
        table.add_row(f"explicit float32 weights / backpropagate, {name}", f"{weights / seconds:.0f}  ({times})", "at least 50")
    result["seconds_of_a_wide_network"] = time_wide()
    table.add_row("one network, n = 4096, d = 96, 8 tokens", f"{result['seconds_of_a_wide_network']:.1f} s", "seconds")
    result["peak_memory_GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    table.add_row("peak memory", f"{result['peak_memory_GiB']:.2f} GiB", "")
    Console(width=140).print(table)
    report(options.out, result)


if __name__ == "__main__":
    main()
