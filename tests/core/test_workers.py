"""Where and in how many pieces the work runs changes no bit of the result, also when a worker is killed."""

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

import shaped
from shaped.engine.block import use_one_thread
from shaped.process import count_cores
from shaped.workers import LocalWorkers, dask_executor, open_executor

BLOCK = shaped.ShapedAttention(0.5) >> shaped.ShapedFeedForward(0.5)
V0 = shaped.equicorrelated(7, 0.2)


def long_work(executor=None):
    """Eight blocks, each long enough to be interrupted."""
    return shaped.propagate(BLOCK, V0, n=80, d=20, samples=8000, seed=3, record="last", executor=executor, chunk=1000)


@functools.cache
def long_work_here():
    return long_work()


def assert_same(one, other):
    assert torch.equal(one.V, other.V)
    assert torch.equal(one.stopped, other.stopped)
    assert one.info == other.info


def test_processes_change_nothing():
    bias = torch.zeros(7, 7).masked_fill(torch.ones(7, 7).triu(2).bool(), float("-inf"))
    layers = BLOCK >> shaped.ShapedAttention(0.5, mask=bias)
    with LocalWorkers(2) as workers:
        for chunk in (None, 5000):
            here, there = (
                shaped.solve(layers, V0, T=0.1, steps=5, samples=5000, seed=1, chunk=chunk, executor=executor, upper=3.0)
                for executor in (None, workers)
            )
            assert 0 < here.stopped.isfinite().sum() < 5000
            assert_same(here, there)
        euler = [shaped.solve(BLOCK, V0, T=1.0, steps=4, samples=3000, seed=1, method="euler", executor=e) for e in (None, workers)]
        assert_same(*euler)
        assert int(euler[0].info["projections"]) > 0


def test_simulations_in_threads_leave_the_number_of_threads_as_it_was():
    """Also if one begins before another ends: torch's number for new threads is one for the whole process."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    found: list[int] = []
    begun, over = threading.Event(), threading.Event()

    def first():
        with use_one_thread():
            begun.set()
            over.wait()

    def second():
        begun.wait()
        with use_one_thread():
            over.set()
            one.join()
            with use_one_thread():  # as the page's simulations, one within another
                pass
            found.append(torch.get_num_threads())

    try:
        one, two = (threading.Thread(target=work) for work in (first, second))
        one.start()
        two.start()
        two.join()
        three = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        three.start()
        three.join()
        assert found == [1, 2]
    finally:
        torch.set_num_threads(before)


def short_work(executor=None):
    return shaped.solve(BLOCK, V0, T=0.1, steps=2, samples=10, seed=0, executor=executor)


def test_a_killed_process_is_replaced():
    with LocalWorkers(2) as workers:
        assert_same(short_work(workers), short_work())  # the processes are up
        pool = workers._pool
        assert pool is not None
        threading.Timer(0.3, lambda: os.kill(next(iter(pool._processes)), signal.SIGKILL)).start()
        there = long_work(workers)
        assert workers._pool is not pool, "the process was killed too late to matter"
    assert_same(there, long_work_here())


KILLED = """
import os, signal
from shaped.process import count_cores
from shaped.workers import LocalWorkers
if __name__ == "__main__":
    workers = LocalWorkers(1)
    print(workers.submit(os.getpid).result(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_do_not_outlive_the_process_that_made_them(tmp_path):
    """They have its standard output, which ends when the last of them is gone."""
    (tmp_path / "killed.py").write_text(KILLED)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "killed.py")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        try:
            assert process.communicate(timeout=60) == ("", None)
        except subprocess.TimeoutExpired:
            os.kill(worker, signal.SIGKILL)
            raise
    assert process.returncode == -signal.SIGKILL


def test_a_killed_dask_worker_changes_nothing():
    distributed = pytest.importorskip("distributed", reason="the extra 'cluster' is not installed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        dask_executor(cluster.scheduler_address) as executor,
    ):
        victim = next(iter(cluster.workers.values())).pid
        killed = []

        def kill():
            killed.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)

        timer = threading.Timer(0.5, kill)
        timer.start()
        there = long_work(executor)
        ended = time.monotonic()
        timer.cancel()
    assert killed, "the work ended before the worker could be killed"
    assert killed[0] < ended
    assert_same(there, long_work_here())


def test_work_of_a_dask_scheduler_that_is_killed_is_done_here():
    pytest.importorskip("distributed", reason="the extra 'cluster' is not installed")
    address = f"tcp://127.0.0.1:{free_port()}"
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    dask, port = [sys.executable, "-m"], address.rsplit(":", 1)[1]
    alone = ["--host", "127.0.0.1", "--port", port, "--no-dashboard"]
    before = signal.getsignal(signal.SIGALRM)
    scheduler = subprocess.Popen([*dask, "distributed.cli.dask_scheduler", *alone], **quiet)
    worker = subprocess.Popen([*dask, "distributed.cli.dask_worker", address, "--no-nanny", "--nthreads", "1", "--no-dashboard"], **quiet)
    try:
        with dask_executor(address, timeout=20.0) as executor:
            assert_same(short_work(executor), short_work())  # the worker is up
            killed = []
            timer = threading.Timer(0.5, lambda: (killed.append(time.monotonic()), scheduler.kill()))
            timer.start()
            signal.signal(signal.SIGALRM, hung)
            signal.alarm(60)
            with pytest.warns(RuntimeWarning, match="the executor fails"):
                there = long_work(executor)
            assert killed
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        for process in (worker, scheduler):
            process.kill()
            process.wait()
    assert_same(there, long_work_here())


def hung(*_: Any) -> None:
    raise TimeoutError("the work hangs")


def free_port() -> int:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return asking.getsockname()[1]


def interrupted_work() -> None:
    with LocalWorkers(1) as workers:
        process = workers.submit(os.getpid).result()
        os.kill(process, signal.SIGINT)  # as a terminal does, to all processes
        assert workers.submit(os.getpid).result() == process, "it did not hear it"
        for future in [workers.submit(time.sleep, 300) for _ in range(4)]:
            future.cancel()
        raise KeyboardInterrupt


def test_ctrl_c_does_not_wait_for_work_under_way():
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted_work()
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense://here:1", "here", "", "127.0.0.1:port"])
def test_no_scheduler_at_that_address(address):
    with pytest.raises(ValueError, match="address of a running Dask scheduler") as caught, dask_executor(address, 0.5):
        pass
    assert address in str(caught.value)


def test_workers_or_scheduler():
    with pytest.raises(ValueError, match="exclude each other"), open_executor(2, "tcp://127.0.0.1:1"):
        pass
    with open_executor(None, None) as executor:
        assert executor is None


class GoneExecutor(LocalWorkers):
    """Accepts work once, never does it, then accepts none."""

    def submit(self, fn, /, *args, **kwargs):
        from concurrent.futures import BrokenExecutor, Future

        if getattr(self, "used", False):
            raise BrokenExecutor("gone")
        self.used = True
        future = Future()
        future.set_exception(BrokenExecutor("gone"))
        return future


def test_work_of_an_executor_that_is_gone_is_done_here():
    with pytest.warns(RuntimeWarning, match="the executor fails"):
        there = short_work(GoneExecutor(1))
    assert_same(there, short_work())


def test_cores_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch):
    """Not those of the machine, where the system tells: in a container they differ."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 6}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert count_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS
    assert count_cores() == 64
