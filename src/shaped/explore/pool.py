"""The pool: worker processes, and turns for the units of all answers under way."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from itertools import count
from typing import Any

COMMAND = ("-m", "shaped.explore.worker")
LONGEST_LINE = 2**24
Message = dict[str, Any]


class WorkerLost(RuntimeError):
    """A worker's process ended before its work."""


class Worker:
    """One process. It computes one unit at a time, and in the middle of it one of stage 0."""

    def __init__(self, tell_ready: Callable[[], None], tell_lost: Callable[[Worker], None]):
        self.stages: dict[int, int] = {}
        """The stage of each unit under way, by number."""
        self.queues: dict[int, asyncio.Queue[Message]] = {}
        self.ready = asyncio.Event()
        self._tell_ready, self._tell_lost = tell_ready, tell_lost

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE,
            start_new_session=True,  # Ctrl-C in a terminal is for the server alone
        )
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for text in self.process.stdout:
            message = json.loads(text)
            if "ready" in message:
                self.ready.set()
                self._tell_ready()
            elif message["job"] in self.queues:
                self.queues[message["job"]].put_nowait(message)
        self._tell_lost(self)
        for queue in self.queues.values():
            queue.put_nowait({"lost": True})

    def send(self, message: Message) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def is_free(self, stage: int) -> bool:
        """May it have a unit of this stage? One of stage 0 interrupts a finer one."""
        return self.ready.is_set() and (not self.stages or (stage == 0 and 0 not in self.stages.values()))

    async def stop(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self._reading


class Pool:
    """Few workers for all pages. Units of coarse stages come first, then those that have waited for longest."""

    def __init__(self, workers: int):
        self._count, self._numbers = workers, count()
        self._workers: list[Worker] = []
        self._waiting: dict[tuple[int, int], asyncio.Future[Worker]] = {}
        """By stage and number."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = self._dead = False

    async def start(self) -> None:
        """Starts the first worker. The others start when it is ready: side by side all of them would be ready later."""
        first = await self._add_worker()
        self._start_task(self._add_others(first))

    async def _add_others(self, first: Worker) -> None:
        await first.ready.wait()
        for _ in range(self._count - 1):
            await self._add_worker()

    async def stop(self) -> None:
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    @property
    def busy(self) -> int:
        """Units under way or waiting."""
        return sum(len(worker.stages) for worker in self._workers) + len(self._waiting)

    async def run(self, unit: str, stage: int, values: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The lines of a unit. Closed early, its work is cancelled, and the worker has its next unit when this one has ended."""
        number = next(self._numbers)
        worker = await self._take(number, stage)
        ended, queue = False, worker.queues[number]
        try:
            worker.send({"job": number, "unit": unit, "stage": stage, "values": values})
            while not ended:
                message = await queue.get()
                ended = "ended" in message or "lost" in message
                if "lost" in message:
                    raise WorkerLost("the process that computes has ended: ask again, with a smaller size if it was short of memory")
                if not ended:
                    yield message["line"]
        finally:
            if ended:
                self._release(worker, number)
            else:
                worker.send({"cancel": number})
                self._start_task(self._release_after(worker, number))

    async def _take(self, number: int, stage: int) -> Worker:
        place = stage, number
        if self._dead:  # what kept a worker from its start, such as a full memory, may be over
            self._dead = False
            self._start_task(self.start())
        future = self._waiting[place] = asyncio.get_running_loop().create_future()
        self._dispatch()
        try:
            return await future
        except asyncio.CancelledError:
            self._waiting.pop(place, None)
            if future.done() and not future.cancelled() and not future.exception():  # a worker was given in the same moment
                self._release(future.result(), number)
            raise

    def _dispatch(self) -> None:
        """Gives free workers to the units that are first in turn."""
        for place in sorted(self._waiting):
            stage, number = place
            if self._waiting[place].done():  # cancelled in this moment; its task takes it off
                continue
            free = [worker for worker in self._workers if worker.is_free(stage)]
            if not free:
                return
            worker = min(free, key=lambda one: len(one.stages))
            worker.stages[number], worker.queues[number] = stage, asyncio.Queue()
            self._waiting.pop(place).set_result(worker)

    def _release(self, worker: Worker, number: int) -> None:
        del worker.stages[number], worker.queues[number]
        self._dispatch()

    async def _release_after(self, worker: Worker, number: int) -> None:
        while not {"ended", "lost"} & (await worker.queues[number].get()).keys():
            pass
        self._release(worker, number)

    def _lost(self, worker: Worker) -> None:
        """A worker that was ready is replaced. One that never was would fail again."""
        if self._stopping:
            return
        self._workers.remove(worker)
        if worker.ready.is_set():
            self._start_task(self._add_worker())
        elif not self._workers:
            for future in self._waiting.values():
                if not future.done():  # cancelled in this moment
                    future.set_exception(WorkerLost("the process that computes does not start: see the terminal of shaped explore"))
            self._waiting.clear()
            self._dead = True

    async def _add_worker(self) -> Worker:
        worker = Worker(self._dispatch, self._lost)
        await worker.start()
        self._workers.append(worker)
        return worker

    def _start_task(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
