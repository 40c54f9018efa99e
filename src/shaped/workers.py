"""Executors for `solve` and `propagate`: processes on this machine, or an existing Dask cluster."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

import torch

from shaped.checks import whole_number
from shaped.process import suggest_install


class LocalWorkers(Executor):
    """A pool of processes. It is created anew if one of them dies, so that lost work can be submitted again.

    The processes import the main script. Its code must be under `if __name__ == "__main__":`.
    """

    def __init__(self, workers: int):
        self._workers, self._pool = whole_number("workers", workers), None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        if self._pool is None:
            self._pool = self._start()
        with shield_children():  # this may start a process
            try:
                return self._pool.submit(fn, *args, **kwargs)
            except BrokenExecutor:
                self._pool.shutdown(wait=False, cancel_futures=True)
                self._pool = self._start()
                return self._pool.submit(fn, *args, **kwargs)

    def _start(self) -> ProcessPoolExecutor:
        # Spawned, not forked: torch's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._workers, mp_context=context, initializer=_begin_work)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)
            self._pool = None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Terminates the processes after an error or Ctrl-C; else waits for their work."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        if kind is None:
            pool.shutdown()
            return
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        # Terminate only after the pool's thread has dropped the cancelled futures. It prints a traceback otherwise.
        patience = time.monotonic() + 1.0
        while pool._cancel_pending_futures and time.monotonic() < patience:
            time.sleep(0.01)
        for process in processes:
            process.terminate()


@contextmanager
def shield_children() -> Iterator[None]:
    """Blocks SIGINT in processes that are started inside. A terminal sends Ctrl-C to all processes; the parent ends its children."""
    resource_tracker.ensure_running()  # started inside, it would reset the signal mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_work() -> None:
    """Runs in a new process: one thread, and an exit when the parent ends. The pool's queue does not notice a killed parent."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def open_executor(workers: int | None, scheduler: str | None) -> Iterator[Executor | None]:
    """An executor for `--workers N` or `--scheduler ADDRESS`; None without them, for this process."""
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
    """The workers of a running Dask cluster. They must be able to import `shaped`. Dask itself retries the work of a dead worker."""
    try:
        from distributed import Client
    except ImportError:
        raise ValueError(f"scheduler needs Dask: {suggest_install('cluster')}") from None
    refused = f"scheduler must be the address of a running Dask scheduler, such as tcp://127.0.0.1:8786, got {address!r}"
    if not re.fullmatch(r"(\w+://)?[^:/\s]+:\d+", address):  # Client's own complaints about an address are long
        raise ValueError(refused)
    try:
        client = Client(address, timeout=timeout, set_as_default=False)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"{refused} ({type(error).__name__})") from None
    with client:
        yield DaskWorkers(client)


class DaskWorkers(Executor):
    """The workers of a Dask cluster.

    If the scheduler is lost, Dask cancels the submitted work. Later submissions would wait for ever, so they raise an error.
    """

    def __init__(self, client: Any):
        self._client, self._workers = client, client.get_executor()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future = self._workers.submit(fn, *args, **kwargs)
        if self._client.status != "running":  # checked after submitting: a later loss cancels this future too
            raise BrokenExecutor(f"the Dask scheduler is gone, its client is {self._client.status}")
        return future
