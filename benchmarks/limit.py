"""How fast is `solve`? Against torchsde with a dense root, against the drawing of its own normals, and as the tokens grow.

    python benchmarks/limit.py [--out FILE]

All ratios are of times taken in this run, on one thread except where two cores are named; medians throughout.
"""

from __future__ import annotations

import argparse
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from common import median_seconds, report
from rich.console import Console
from rich.table import Table

import shaped
from shaped.covariance import vech

GAMMA = 8**-0.5
BLOCK = shaped.ShapedAttention(GAMMA) >> shaped.ShapedFeedForward(GAMMA)


class DenseSDE(torch.nn.Module):
    """The same equation for torchsde: state vech(V), noise by a root of the dense p x p Sigma.

    The root is the symmetric one, as the theorem writes it, or Cholesky's, the cheapest there is.
    """

    noise_type, sde_type = "general", "ito"

    def __init__(self, m: int, root: str):
        super().__init__()
        self.m, self.root = m, root
        self.rows, self.columns = torch.triu_indices(m, m)

    def matrix(self, y: torch.Tensor) -> torch.Tensor:
        V = y.new_zeros(len(y), self.m, self.m)
        V[:, self.rows, self.columns] = y
        V[:, self.columns, self.rows] = y
        return V

    def f(self, t: float, y: torch.Tensor) -> torch.Tensor:
        return vech(BLOCK.drift(self.matrix(y)))

    def g(self, t: float, y: torch.Tensor) -> torch.Tensor:
        Sigma = BLOCK.Sigma(self.matrix(y))
        if self.root == "cholesky":
            return torch.linalg.cholesky_ex(Sigma).L
        values, vectors = torch.linalg.eigh(Sigma)
        return vectors * values.clamp(min=0.0).sqrt()[:, None, :] @ vectors.mT


def run_solve(m: int, samples: int, steps: int) -> None:
    V0 = shaped.equicorrelated(m, 0.2)
    shaped.solve(BLOCK, V0, T=0.01 * steps, steps=steps, samples=samples, seed=0, record="last", progress=False)


def per_sample_step(m: int, samples: int, steps: int, repeats: int) -> float:
    return median_seconds(lambda: run_solve(m, samples, steps), repeats=repeats) / (samples * steps)


def run_torchsde(m: int, root: str, samples: int, steps: int) -> None:
    import torchsde

    y0 = vech(shaped.equicorrelated(m, 0.2)).expand(samples, -1)
    times = torch.tensor([0.0, 0.01 * steps], dtype=torch.float64)
    brownian = torchsde.BrownianInterval(0.0, 0.01 * steps, size=(samples, y0.shape[1]), dtype=torch.float64, entropy=0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchsde.sdeint(DenseSDE(m, root), y0, times, bm=brownian, method="euler", dt=0.01)


def torchsde_per_sample_step(m: int, root: str) -> float:
    samples, steps = max(8, 2048 // m**2), 5
    return median_seconds(lambda: run_torchsde(m, root, samples, steps), repeats=5) / (samples * steps)


def against_torchsde() -> list[dict[str, Any]]:
    rows = []
    for m in (2, 4, 8, 12, 16):
        ours = per_sample_step(m, 4 * 2**15 // m**2, 20, 7)
        for root in ("symmetric", "cholesky"):
            dense = torchsde_per_sample_step(m, root)
            rows.append({"tokens": m, "root": root, "torchsde_us": 1e6 * dense, "shaped_us": 1e6 * ours, "ratio": dense / ours})
    return rows


def growth() -> dict[str, Any]:
    sizes = (32, 64, 128, 256)
    times = [per_sample_step(m, max(2, 2**15 // m**2), 5, 5) for m in sizes]
    slope = math.log(times[-1] / times[0]) / math.log(sizes[-1] / sizes[0])
    return {"tokens": list(sizes), "us_per_sample_step": [1e6 * t for t in times], "exponent": slope}


def against_normals() -> dict[str, Any]:
    """The Transformer takes 2·m² normals a step and sample: one matrix for the weights, one for the logits."""
    samples, steps, m = 4096, 75, 4
    generator = torch.Generator().manual_seed(0)
    drawing = median_seconds(lambda: torch.randn(samples * 2 * m**2, dtype=torch.float64, generator=generator), repeats=51)
    ours = per_sample_step(m, samples, steps, 9) * samples
    return {"solve_ms_a_step": 1e3 * ours, "randn_ms": 1e3 * drawing, "ratio": ours / drawing}


def figure_one() -> float:
    V0 = shaped.equicorrelated(4, 0.2)
    return median_seconds(lambda: shaped.solve(BLOCK, V0, T=0.75, steps=75, samples=4096, seed=0, progress=False), repeats=7)


def on_the_gpu() -> dict[str, Any]:
    """The same densities with many more samples on the GPU, in double and single precision."""
    V0, rows = shaped.equicorrelated(4, 0.2), {}
    for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        for samples in (4096, 2**20):
            seconds = median_seconds(
                lambda samples=samples, dtype=dtype: shaped.solve(
                    BLOCK, V0, T=0.75, steps=75, samples=samples, seed=0, record="last", device="cuda", dtype=dtype, progress=False
                ),
                repeats=5,
            )
            rows[f"{name}, {samples} samples: seconds"] = seconds
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/limit.json"))
    out = parser.parse_args().out
    torch.set_num_threads(1)
    result: dict[str, Any] = {"against_normals": against_normals(), "growth": growth()}
    try:
        result["against_torchsde"] = against_torchsde()
    except ImportError:
        print("torchsde is not installed: not compared with it")
    torch.set_num_threads(2)
    result["figure_1_seconds_on_two_cores"] = figure_one()
    if torch.cuda.is_available():
        result["gpu"] = on_the_gpu()

    table = Table("what", "measured", "wanted")
    for row in result.get("against_torchsde", ()):
        wanted = "at least 200" if (row["tokens"], row["root"]) == (16, "symmetric") else ""
        times = f"{row['torchsde_us']:.1f} / {row['shaped_us']:.2f} µs a sample and step"
        table.add_row(f"torchsde, {row['root']} root / solve, m = {row['tokens']}", f"{row['ratio']:.0f}  ({times})", wanted)
    table.add_row("exponent of the cost, m = 32 to 256", f"{result['growth']['exponent']:.2f}", "at most 3.3")
    normals = result["against_normals"]
    times = f"{normals['solve_ms_a_step']:.2f} / {normals['randn_ms']:.2f} ms a step"
    table.add_row("solve / torch.randn of its normals, m = 4", f"{normals['ratio']:.2f}  ({times})", "at most 3")
    table.add_row("Figure 1's density on two cores", f"{result['figure_1_seconds_on_two_cores']:.2f} s", "under 2 s")
    for what, seconds in result.get("gpu", {}).items():
        table.add_row(f"GPU, {what}", f"{seconds:.3f}", "")
    Console(width=120).print(table)
    report(out, result)


if __name__ == "__main__":
    main()
