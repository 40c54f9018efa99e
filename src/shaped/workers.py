"""Executors for `solve` and `propagate`: processes on this machine, or an existing Dask cluster."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from shaped.checks import whole_number


class LocalWorkers(Executor):
    """A pool of processes that is made anew when one of them dies, so that lost work can be handed in again.

    The processes import the script that makes them: what it does must stand under `if __name__ == "__main__":`.
    """

    def __init__(self, workers: int):
        self._workers, self._pool = whole_number("workers", workers), None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        if self._pool is None:
            self._pool = self._started()
        try:
            return self._pool.submit(fn, *args, **kwargs)
        except BrokenExecutor:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = self._started()
            return self._pool.submit(fn, *args, **kwargs)

    def _started(self) -> ProcessPoolExecutor:
        # Spawned, not forked: torch's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._workers, mp_context=context, initializer=_begin_work)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)
            self._pool = None


def _begin_work() -> None:
    """In a new process: one thread, and an end when the process that made it ends, however it does: its queue would not tell of a kill."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def working_on(workers: int | None, scheduler: str | None) -> Iterator[Executor | None]:
    """An executor for `--workers N` or `--scheduler ADDRESS`; None for this process alone."""
    if workers is not None and scheduler is not None:
        raise ValueError(f"workers and scheduler exclude each other, got {workers} and {scheduler!r}")
    if scheduler is not None:
        with dask_executor(scheduler) as executor:
            yield executor
    elif workers is None:
        yield None
    else:
        with LocalWorkers(workers) as executor:
            yield executor


@contextmanager
def dask_executor(address: str, timeout: float = 5.0) -> Iterator[Executor]:
    """The workers of a running Dask cluster, which must be able to import `shaped`. Dask itself repeats the work of a worker that dies."""
    try:
        from distributed import Client
    except ImportError:
        raise ValueError("scheduler needs Dask: pip install 'shaped-transformer[cluster]'") from None
    refused = f"scheduler must be the address of a running Dask scheduler, such as tcp://127.0.0.1:8786, got {address!r}"
    if not re.fullmatch(r"(\w+://)?[^:/\s]+:\d+", address):  # Client's own complaints about an address are long
        raise ValueError(refused)
    try:
        client = Client(address, timeout=timeout, set_as_default=False)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"{refused} ({type(error).__name__})") from None
    with client:
        yield client.get_executor()
