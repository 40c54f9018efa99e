"""How fast is the law of a large Transformer's block? Llama-3.1-405B, 64 tokens, without its weights, against the random numbers alone.

    python benchmarks/blocks.py [--layers 2] [--samples 4] [--threads 2] [--out FILE]

Each thread advances its own samples, one at a time. The floor is the time for the normals that a step must draw: of the queries, the keys
and the hidden features, m each. Times are those of the processor, a thread's own, so that other programs do not disturb them much; `wall`
is the clock's. `--layers 126 --samples 16` is the whole model.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from common import report

import shaped
from shaped import AttentionBranch, FeedForwardBranch, Norm, ResidualBlock, Weights
from shaped.covariance import Point
from shaped.layers.base import Sizes
from shaped.randomness import Stream

M, N, HIDDEN, HEADS, KEY_HEADS, WIDTH, DEPTH, SAMPLES = 64, 16_384, 53_248, 128, 8, 128, 126, 16
W, RMS = Weights(0.02), Norm("rms")
ATTENTION = AttentionBranch(HEADS, WIDTH, W, W, W, W, key_heads=KEY_HEADS, mask="causal", rope=500_000.0)
FEED_FORWARD = FeedForwardBranch(HIDDEN, W, W, activation="silu", gated=True)
BLOCK = ResidualBlock(ATTENTION, norm=RMS) >> ResidualBlock(FEED_FORWARD, norm=RMS)
NORMALS = M * (2 * HIDDEN + (HEADS + KEY_HEADS) * WIDTH)
PIECE = 2**16


def advance(sample: int, layers: int) -> None:
    stream = Stream(0, sample, dtype=torch.float32, device=torch.device("cpu"))
    point = Point(matrix=(W.std**2 * shaped.equicorrelated(M, 0.0, dtype=torch.float32)).expand(1, M, M))
    for _ in range(layers):
        point = BLOCK.advance_gram(point, Sizes(N), stream)
    assert point.V.isfinite().all()


def draw_normals(sample: int, layers: int) -> None:
    generator = torch.Generator().manual_seed(sample)
    for _ in range(layers * NORMALS // PIECE):
        torch.randn(PIECE, generator=generator)


def measure(work: Callable[[int, int], None], layers: int, samples: int, threads: int) -> dict[str, float]:
    """Seconds for a sample and layer, of the processor, and seconds of the clock for all."""

    def clock(sample: int) -> float:
        start = time.thread_time()
        work(sample, layers)
        return time.thread_time() - start

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        seconds = sum(pool.map(clock, range(samples)))
    return {"seconds": seconds / (layers * samples), "wall": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/blocks.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (options.layers, options.samples, options.threads)
    advance(0, 1)
    floor, law = measure(draw_normals, *sizes), measure(advance, *sizes)
    whole = law["seconds"] * DEPTH * SAMPLES / options.threads
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    ratio = law["seconds"] / floor["seconds"]
    print(f"a layer and sample: {1e3 * law['seconds']:.1f} ms, its normals alone {1e3 * floor['seconds']:.1f} ms, ratio {ratio:.2f}")
    print(f"{DEPTH} layers, {SAMPLES} samples, {options.threads} threads: {whole:.0f} s of each, peak memory {memory:.2f} GiB")
    print(f"these {options.layers} layers and {options.samples} samples by the clock: {law['wall']:.1f} s")
    report(options.out, {"law": law, "floor": floor, "ratio": ratio, "whole_s": whole, "peak_memory_GiB": memory})


if __name__ == "__main__":
    main()
