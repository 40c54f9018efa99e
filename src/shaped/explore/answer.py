"""The answer to a question: its lines, stage after stage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from shaped.explore.code import write_command, write_python
from shaped.explore.fields import Question
from shaped.explore.first_answer import find_first_lines
from shaped.explore.pool import Pool, WorkerLost
from shaped.explore.units import STAGES
from shaped.process import quote_error

Line = dict[str, Any]
END = object()


async def answer(pool: Pool, asked: Question) -> AsyncGenerator[Line, None]:
    """The lines in order. Units of one stage are computed side by side; the next stage begins when all have ended."""
    began = time.perf_counter()
    yield {"kind": "question", "values": asked.values, "python": write_python(asked), "command": write_command(asked)}
    ready = find_first_lines(asked.values)
    for line in ready:
        yield line
    for stage in range(1 if ready else 0, len(STAGES)):
        async with aclosing(run_stage(pool, asked, stage)) as lines:
            async for line in lines:
                yield line
                if line["kind"] == "error":
                    return
    yield {"kind": "done", "seconds": round(time.perf_counter() - began, 3)}


async def run_stage(pool: Pool, asked: Question, stage: int) -> AsyncGenerator[Line, None]:
    queue: asyncio.Queue[Any] = asyncio.Queue()

    async def run(unit: str) -> None:
        try:
            async with aclosing(pool.run(unit, stage, asked.values)) as lines:
                async for line in lines:
                    queue.put_nowait(line)
        except WorkerLost as error:
            queue.put_nowait({"kind": "error", "error": str(error)})
        except Exception as error:  # else the page would wait for panels that never come
            queue.put_nowait({"kind": "error", "error": f"{type(error).__name__}: {quote_error(error)}"})
        finally:
            queue.put_nowait(END)

    tasks = [asyncio.create_task(run(unit)) for unit in STAGES[stage]]
    try:
        left = len(tasks)
        while left:
            line = await queue.get()
            if line is END:
                left -= 1
            else:
                yield line
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
