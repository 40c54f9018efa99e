"""Runs a Markov chain of covariances for many samples: blocks, recording, stopping, progress.

Samples are cut into blocks whose size depends on the process, the number of tokens and the kind of device alone. A block has its own
stream of random numbers and is always computed as a whole, on one thread, so results do not depend on how many blocks are worked on
together, or where.
"""

from __future__ import annotations

import itertools
import math
import pickle
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from shaped.checks import as_tensor, in_range, usable, whole_number
from shaped.covariance import FEW, Point, batch_innermost, check_covariance, eigen_factor, symmetrised
from shaped.randomness import Stream
from shaped.trajectory import Trajectory

S = TypeVar("S")
A = TypeVar("A")
R = TypeVar("R")
Record = str | int


class Process(ABC, Generic[S]):
    """One step at a time: what `solve` and `propagate` hand to the engine. S is the state of a block of paths."""

    kind: ClassVar[str]
    """Its name; processes of different kinds draw different random numbers from the same seed."""
    together: ClassVar[int] = 1
    """Blocks hold a multiple of so many paths."""

    @abstractmethod
    def start(self, V0: Float[Tensor, "batch m m"], stream: Stream) -> S: ...

    @abstractmethod
    def step(self, state: S, stream: Stream) -> tuple[S, Bool[Tensor, " batch"] | None]:
        """The next state, and on which paths something happened that is worth counting (None: on none)."""

    @abstractmethod
    def covariance(self, state: S) -> Float[Tensor, "batch m m"]: ...

    @abstractmethod
    def select(self, choice: Bool[Tensor, " batch"], yes: S, no: S) -> S:
        """The paths of `yes` where `choice` holds, those of `no` elsewhere."""

    def entries(self, m: int) -> int:
        """How many numbers the state of a path is made of: blocks hold fewer samples where it is more."""
        return m**2


class PointProcess(Process[Point]):
    """A process whose state is the covariance itself."""

    def start(self, V0: Float[Tensor, "batch m m"], stream: Stream) -> Point:
        return Point(matrix=V0)

    def covariance(self, state: Point) -> Float[Tensor, "batch m m"]:
        return state.V

    def select(self, choice: Bool[Tensor, " batch"], yes: Point, no: Point) -> Point:
        return Point(matrix=torch.where(choice[:, None, None], yes.V, no.V))


@dataclass(frozen=True, eq=False)
class Job:
    """Everything that determines the paths of one block."""

    process: Process
    V0: Float[Tensor, "batch m m"]
    steps: int
    kept: tuple[int, ...]
    dt: float
    bounds: Bounds
    seed: int
    block: int


@dataclass(frozen=True)
class Bounds:
    """When a path stops: eigenvalues above `upper` or below `lower`; None: only what leaves the safe part of the float range."""

    upper: float | None
    lower: float | None

    def crossed(self, V: Float[Tensor, "batch m m"]) -> Bool[Tensor, " batch"]:
        crossed = ~is_safe(V)
        eye = torch.eye(V.shape[-1], dtype=V.dtype, device=V.device)
        # A matrix is positive definite exactly when its Cholesky factor exists: cheaper than its eigenvalues.
        if self.upper is not None:
            upper = min(self.upper, torch.finfo(V.dtype).max)
            crossed |= torch.linalg.cholesky_ex(upper * eye - V).info > 0
        if self.lower:  # nothing is below 0
            crossed |= torch.linalg.cholesky_ex(V - self.lower * eye).info > 0
        return crossed


def is_safe(V: Float[Tensor, "batch m m"]) -> Bool[Tensor, " batch"]:
    """Is V of a size whose cube, which the drift takes, neither overflows nor loses digits? Never where it is not finite.

    The diagonal tells: no entry of a positive semi-definite matrix is larger than its largest diagonal entry.
    """
    size = V.diagonal(dim1=-2, dim2=-1).amax(-1)
    limits = torch.finfo(V.dtype)
    return (size > limits.tiny**0.25) & (size < limits.max**0.25)


def run(
    process: Process,
    V0: Any,
    *,
    steps: int,
    dt: float,
    samples: int | None,
    seed: int,
    record: Record,
    upper: float | None,
    lower: float | None,
    device: str | torch.device,
    dtype: torch.dtype,
    chunk: int | None,
    executor: Executor | None,
    progress: bool | None,
    info: dict[str, Any],
    event: str | None = None,
) -> Trajectory:
    """Simulates `samples` paths of `process` over `steps` steps of length `dt`, from V0."""
    where = usable(device)
    V0 = checked_start(V0, samples, dtype).to(where)
    count, m = V0.shape[0], V0.shape[-1]
    seed = whole_number("seed", seed, least=0, most=math.inf)
    if chunk is not None:
        chunk = whole_number("chunk", chunk)
    upper, lower = (
        None if bound is None else in_range(name, bound, 0.0, sys.float_info.max) for name, bound in (("upper", upper), ("lower", lower))
    )
    kept = recorded_steps(record, steps)
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise ValueError(f"executor must have a method submit, as those of concurrent.futures have, got {type(executor).__name__}")

    size = max(process.together, block_size(process.entries(m), where))
    V = allocated((len(kept), count, m, m), dtype, where)
    stopped = torch.empty(count, dtype=torch.float64)
    events = 0

    def job(block: int) -> Job:
        start = V0[block * size : (block + 1) * size]
        start = start if start.stride(0) == 0 else start.clone()  # a slice would take the whole of V0 along to a worker
        return Job(process, start, steps, kept, dt, Bounds(upper, lower), seed, block)

    blocks = math.ceil(count / size)
    with progress_bar(progress, total=blocks * steps) as advance:
        if executor is None:
            results = ((block, run_block(job(block), lambda: advance(1))) for block in range(blocks))
        else:
            together = max(1, (chunk or 1) // size)
            chunks = [range(first, min(first + together, blocks)) for first in range(0, blocks, together)]
            results = run_elsewhere(executor, chunks, job, lambda count: advance(count * steps))
        for block, (recorded, ended, happened) in results:
            place = slice(block * size, block * size + len(ended))
            V[:, place], stopped[place] = recorded, ended
            events += happened
    t = torch.tensor(kept, dtype=torch.float64) * dt
    return Trajectory(t, V, stopped, info | {"seed": seed} | ({event: events} if event else {}))


Result = tuple[Tensor, Tensor, int]
TRIES = 3
AHEAD = 256  # tasks that an executor has at a time


def run_elsewhere(
    executor: Executor, chunks: list[range], job: Callable[[int], Job], advance: Callable[[int], None]
) -> Iterator[tuple[int, Result]]:
    """Runs chunks of blocks on an executor and yields each block's result as it comes in."""
    for place, results in scattered(executor, run_chunk, Bundles(chunks, job)):
        for block, (recorded, ended, count) in zip(chunks[place], results, strict=True):
            yield block, (torch.from_numpy(recorded), torch.from_numpy(ended), count)
        advance(len(chunks[place]))


@dataclass(frozen=True)
class Bundles(Sequence[bytes]):
    """The jobs of each chunk as bytes, made when they are asked for: all together may not fit into memory.

    As bytes, because torch would pass tensors between processes through shared memory, which ends with the process.
    """

    chunks: list[range]
    job: Callable[[int], Job]

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, place: Any) -> Any:
        return pickle.dumps([self.job(block) for block in self.chunks[place]])


def scattered(executor: Executor, work: Callable[[A], R], tasks: Sequence[A]) -> Iterator[tuple[int, R]]:
    """work(task) for every task on an executor; yields each task's place and its result as it comes in.

    A task whose worker died is handed in again, up to TRIES times, and at last done here, where a real error shows as itself.
    """
    waiting: dict[Future, tuple[int, int]] = {}
    left = iter(range(len(tasks)))
    try:
        while True:
            for place in itertools.islice(left, AHEAD - len(waiting)):
                waiting[handed_in(executor, work, tasks[place])] = place, 1
            if not waiting:
                return
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                place, tries = waiting.pop(future)
                try:
                    result = future.result()
                except ValueError:
                    raise  # what the caller got wrong goes wrong everywhere
                except Exception as error:
                    if tries < TRIES:
                        waiting[handed_in(executor, work, tasks[place])] = place, tries + 1
                        continue
                    warnings.warn(f"the executor fails ({error!r}): its work is done in this process", RuntimeWarning, stacklevel=2)
                    result = work(tasks[place])
                yield place, result
    finally:
        for future in waiting:
            future.cancel()


def handed_in(executor: Executor, work: Callable[[A], R], task: A) -> Future:
    """A task in the hands of an executor; that of one that takes no more work has failed already."""
    try:
        return executor.submit(work, task)
    except Exception as error:
        failed = Future()
        failed.set_exception(error)
        return failed


def run_chunk(jobs: bytes) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """The work of one chunk, in whatever process it runs."""
    results = (run_block(job) for job in pickle.loads(jobs))
    return [(recorded.cpu().numpy(), ended.numpy(), count) for recorded, ended, count in results]


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it torch computes on one thread: matrices here are small, and sums must not depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def run_block(job: Job, advance: Callable[[], None] = lambda: None) -> Result:
    """The recorded covariances of one block, its stopping times, and how many events were counted."""
    V0 = batch_innermost(job.V0) if job.V0.shape[-1] <= FEW else job.V0.contiguous()
    stream = Stream(job.seed, job.block, kind=job.process.kind, dtype=V0.dtype, device=V0.device)
    process, samples = job.process, len(V0)
    parked = state = process.start(V0, stream)
    shown, alive, events = V0, ~job.bounds.crossed(V0), 0
    stopped = torch.where(alive, math.inf, 0.0).to(torch.float64)
    recorded = V0.new_empty(len(job.kept), *V0.shape)
    if job.kept[0] == 0:
        recorded[0] = V0
    place = {step: i for i, step in enumerate(job.kept)}
    running = int(alive.sum())
    for step in range(1, job.steps + 1):
        if running:
            state, happened = process.step(state, stream)
            V = process.covariance(state)
            crossed = job.bounds.crossed(V)
            if happened is not None:
                events += int((happened & alive).sum())
            if running < samples or crossed.any():
                # A path shows the state in which it stopped (its last safe one, if it jumped out of the float range), and goes on
                # unseen from its start.
                shown = torch.where((alive & is_safe(V))[:, None, None], V, shown)
                stopped = torch.where(alive & crossed, step * job.dt, stopped)
                alive = alive & ~crossed
                running = int(alive.sum())
                state = process.select(alive, state, parked)
            else:
                shown = V
        if step in place:
            recorded[place[step]] = symmetrised(shown)
        advance()
    return recorded, stopped.cpu(), events


def allocated(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError):
        size = math.prod(shape) * dtype.itemsize / 2**30
        raise ValueError(f"samples and record ask for {size:.3g} GiB, more than {device} has: record fewer steps or samples") from None


def block_size(entries: int, device: torch.device) -> int:
    """Samples a block: enough to hide Python's overhead, few enough to stay in the cache (CPU) or in memory (GPU)."""
    budget, most = (2**16, 2**12) if device.type == "cpu" else (2**24, 2**16)
    return max(1, min(most, 2 ** int(math.log2(max(1, budget // entries)))))


def recorded_steps(record: Record, steps: int) -> tuple[int, ...]:
    if isinstance(record, str) and record in ("all", "last"):
        return tuple(range(steps + 1)) if record == "all" else (steps,)
    try:
        return (*range(0, steps, whole_number("record", record)), steps)
    except ValueError:
        raise ValueError(f"record must be 'all', 'last' or a whole number of steps, at least 1, got {record!r}") from None


def checked_start(V0: Any, samples: int | None, dtype: torch.dtype) -> Float[Tensor, "sample m m"]:
    """V0 for every sample, symmetric, and positive semi-definite but for rounding."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float64 or torch.float32, got {dtype}")
    V0 = as_tensor("V0", V0).detach()
    if samples is not None:
        samples = whole_number("samples", samples)
    if V0.ndim > 3:
        raise ValueError(f"V0 must be square, [m, m] or [samples, m, m], got shape {tuple(V0.shape)}")
    if V0.is_complex():
        raise ValueError(f"V0 must be real, got {V0.dtype}")
    V0 = V0.to(torch.float64)
    check_covariance(V0, "V0")
    V0 = symmetrised(V0)
    # In units of the tokens' lengths: what is rounding for a long token may be all there is of a short one.
    length = V0.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sqrt()
    length = torch.where(length > 0.0, length, 1.0)
    least = torch.linalg.eigvalsh(V0 / length[..., :, None] / length[..., None, :])[..., :1, None]
    indefinite = least < -8 * V0.shape[-1] * torch.finfo(V0.dtype).eps
    if indefinite.any():
        root = eigen_factor(V0)
        V0 = torch.where(indefinite, symmetrised(root @ root.mT), V0)
    cast = V0.to(dtype)
    if not cast.isfinite().all():
        raise ValueError(f"V0 must fit into {dtype}, got an entry {V0.abs().max().item():.3g}")
    if cast.ndim == 2:
        return cast.expand(samples or 1, -1, -1)
    if samples not in (None, cast.shape[0]):
        raise ValueError(f"samples must be {cast.shape[0]}, the number of matrices in V0, or left out, got {samples}")
    return cast


@contextmanager
def progress_bar(wanted: bool | None, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of steps done since the last call.

    Shows a bar on work of over a second (None), at once (True) or never (False).

    Nothing is ever shown where standard error is not a terminal.
    """
    if wanted is False:
        yield lambda steps: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda steps: None
        return
    bar = Progress("simulating", BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), console=console, transient=True)
    task = bar.add_task("simulating", total=total)
    patience = time.monotonic() + (0.0 if wanted else 1.0)

    def advance(steps: int) -> None:
        bar.advance(task, steps)
        if not bar.live.is_started and time.monotonic() > patience:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()
