"""Blocks of samples, run in threads. The numbers do not depend on how many there are."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from shaped.engine.block import use_one_thread
from shaped.engine.progress import progress_bar

Report = Callable[[], bool]
RunBlock = Callable[[int, int, Report], dict[str, Tensor]]
"""From the number of a block, its samples and `report` to arrays whose last dimension is the samples. `report` is called after each step
and returns False if the work is to end."""


def run_blocks(
    run_block: RunBlock, samples: int, size: int, steps: int, threads: int, device: torch.device, progress: bool | None
) -> dict[str, Tensor]:
    """The results of all blocks, joined; `size` samples and `steps` steps in each block."""
    blocks = math.ceil(samples / size)
    threads = min(threads, blocks) if device.type == "cpu" else 1
    lock, stop = threading.Lock(), threading.Event()
    with progress_bar(progress, blocks * steps) as advance:

        def report() -> bool:
            with lock:
                advance(1)
            return not stop.is_set()

        def work(block: int) -> dict[str, Tensor]:
            with use_one_thread():
                return run_block(block, min(size, samples - block * size), report)

        pool = ThreadPoolExecutor(threads)
        try:
            parts = list(pool.map(work, range(blocks)))
        finally:
            stop.set()  # after Ctrl-C the threads end with their current layer
            pool.shutdown(cancel_futures=True)
    return {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}
