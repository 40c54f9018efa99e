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


class LocalWorkers(Executor):
    """A pool of processes that is made anew when one of them dies, so that lost work can be handed in again.

    The processes import the script that makes them: what it does must stand under `if __name__ == "__main__":`.
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
        """After an error or Ctrl-C nobody waits for the work that is under way."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        if kind is None:
            pool.shutdown()
            return
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        # The pool's thread must have dropped what is cancelled before it finds the processes gone: it would print a traceback.
        patience = time.monotonic() + 1.0
        while pool._cancel_pending_futures and time.monotonic() < patience:
            time.sleep(0.01)
        for process in processes:
            process.terminate()


@contextmanager
def shield_children() -> Iterator[None]:
    """Processes that are started within it do not hear Ctrl-C, which a terminal sends to all: the one that made them ends them."""
    resource_tracker.ensure_running()  # it would undo the mask where it is started within
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
def open_executor(workers: int | None, scheduler: str | None) -> Iterator[Executor | None]:
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
        yield DaskWorkers(client)


class DaskWorkers(Executor):
    """The workers of a Dask cluster, as long as its scheduler is there.

    When it is lost, Dask cancels what was handed in. What is handed in after that would wait for ever, so it is refused.
    """

    def __init__(self, client: Any):
        self._client, self._workers = client, client.get_executor()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future = self._workers.submit(fn, *args, **kwargs)
        if self._client.status != "running":  # asked afterwards: from now on a loss cancels this future too
            raise BrokenExecutor(f"the Dask scheduler is gone, its client is {self._client.status}")
        return future
