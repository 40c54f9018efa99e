"""Work on an executor: a pool of processes, a cluster."""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from shaped.engine.block import BlockResult, run_block
from shaped.engine.walk import Job

A = TypeVar("A")
R = TypeVar("R")
TRIES = 3
AHEAD = 256  # tasks that an executor has at a time


def scatter(executor: Executor, work: Callable[[A], R], tasks: Sequence[A]) -> Iterator[tuple[int, R]]:
    """Runs work(task) for every task on an executor. Yields each task's index and result as they arrive, in any order.

    A task that fails is submitted again, up to TRIES times in all. Then it runs in this process, where a real error shows as itself.
    """
    waiting: dict[Future, tuple[int, int]] = {}
    left = iter(range(len(tasks)))
    try:
        while True:
            for place in itertools.islice(left, AHEAD - len(waiting)):
                waiting[submit(executor, work, tasks[place])] = place, 1
            if not waiting:
                return
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                place, tries = waiting.pop(future)
                try:
                    result = future.result()
                except ValueError:
                    raise  # a wrong argument is wrong everywhere
                except Exception as error:
                    if tries < TRIES:
                        waiting[submit(executor, work, tasks[place])] = place, tries + 1
                        continue
                    warnings.warn(f"the executor fails ({error!r}): its work is done in this process", RuntimeWarning, stacklevel=2)
                    result = work(tasks[place])
                yield place, result
    finally:
        for future in waiting:
            future.cancel()


def submit(executor: Executor, work: Callable[[A], R], task: A) -> Future:
    """Submits a task. If the executor refuses it, the future has failed already."""
    try:
        return executor.submit(work, task)
    except Exception as error:
        failed = Future()
        failed.set_exception(error)
        return failed


def run_on_executor(
    executor: Executor, chunks: list[range], job: Callable[[int], Job], advance: Callable[[int], None]
) -> Iterator[tuple[int, BlockResult]]:
    """Runs chunks of blocks on an executor. Yields each block's number and result as they arrive; tells `advance` the number of blocks."""
    for place, results in scatter(executor, run_chunk, PickledChunks(chunks, job)):
        for block, (recorded, stopped, events) in zip(chunks[place], results, strict=True):
            yield block, (torch.from_numpy(recorded), torch.from_numpy(stopped), events)
        advance(len(chunks[place]))


@dataclass(frozen=True)
class PickledChunks(Sequence[bytes]):
    """The jobs of each chunk as bytes. They are pickled on access: all of them together may not fit into memory.

    Pickled here, because torch would pass tensors between processes through shared memory, which ends with the process.
    """

    chunks: list[range]
    job: Callable[[int], Any]

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, place: Any) -> Any:
        return pickle.dumps([self.job(block) for block in self.chunks[place]])


def run_chunk(jobs: bytes) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """Runs the blocks of one chunk, in the worker's process."""
    results = (run_block(job) for job in pickle.loads(jobs))
    return [(recorded.cpu().numpy(), stopped.numpy(), events) for recorded, stopped, events in results]
