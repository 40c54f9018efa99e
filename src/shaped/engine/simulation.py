"""`run`: all paths of a process, block by block."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shaped.engine.block import block_size, run_block
from shaped.engine.executors import run_on_executor
from shaped.engine.options import RunOptions
from shaped.engine.process import Process
from shaped.engine.progress import progress_bar
from shaped.engine.start import prepare_start, take_block
from shaped.engine.walk import Bounds, Job
from shaped.trajectory import Trajectory


def run(
    process: Process, V0: Any, options: RunOptions, *, steps: int, dt: float, info: dict[str, Any], event: str | None = None
) -> Trajectory:
    """Simulates paths of `process` over `steps` steps of length `dt`, from V0.

    The result's `info` is `info` with the seed and, under the name `event`, the number of events.
    """
    device = torch.device(options.device)
    V0 = prepare_start(V0, options.samples, options.dtype).to(device)
    count, m = V0.shape[0], V0.shape[-1]
    recorded_steps, bounds = options.list_recorded_steps(steps), Bounds(options.upper, options.lower)
    size = block_size(process, m, device)
    V = allocate((len(recorded_steps), count, m, m), options.dtype, device)
    stopped = torch.empty(count, dtype=torch.float64, device="cpu")
    events = 0

    def job(block: int) -> Job:
        return Job(process, take_block(V0, block, size), steps, recorded_steps, dt, bounds, options.seed, block)

    blocks = math.ceil(count / size)
    with progress_bar(options.progress, total=blocks * steps) as advance:
        if options.executor is None:
            results = ((block, run_block(job(block), lambda: advance(1))) for block in range(blocks))
        else:
            together = max(1, (options.chunk or 1) // size)
            chunks = [range(first, min(first + together, blocks)) for first in range(0, blocks, together)]
            results = run_on_executor(options.executor, chunks, job, lambda count: advance(count * steps))
        for block, (recorded, ended, happened) in results:
            place = slice(block * size, block * size + len(ended))
            V[:, place], stopped[place] = recorded, ended
            events += happened
    t = torch.tensor(recorded_steps, dtype=torch.float64, device="cpu") * dt
    return Trajectory(t, V, stopped, info | {"seed": options.seed} | ({event: events} if event else {}))


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError):
        size = math.prod(shape) * dtype.itemsize / 2**30
        raise ValueError(f"samples and record ask for {size:.3g} GiB, more than {device} has: record fewer steps or samples") from None
