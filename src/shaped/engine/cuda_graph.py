"""A step of a block as one CUDA graph.

A step has hundreds of small kernels. Launched one by one, they take longer to launch than to run.
"""

from __future__ import annotations

import warnings

import torch
from jaxtyping import Float
from torch import Tensor

from shaped.engine.walk import Job, Walk
from shaped.process import quote_error
from shaped.randomness import Stream

FEWEST = 16
"""Steps. Capturing takes about as long as four steps."""


def is_worth_a_graph(job: Job, V0: Float[Tensor, "batch m m"]) -> bool:
    return V0.is_cuda and job.steps >= FEWEST and job.process.is_capturable(V0)


def capture_walk(job: Job, V0: Float[Tensor, "batch m m"]) -> Walk | None:
    """A walk whose steps are one CUDA graph, with the same results to the bit. None, with a warning, if a step cannot be captured."""
    try:
        return CapturedWalk(job, V0)
    except RuntimeError as error:
        torch.cuda.synchronize()
        warnings.warn(f"no CUDA graph, steps are launched one by one: {quote_error(error)}", RuntimeWarning, stacklevel=2)
        return None


class CapturedWalk(Walk):
    """The graph has no branches: every step is treated as one in which a path may stop. It reads and writes the same memory each time."""

    def __init__(self, job: Job, V0: Float[Tensor, "batch m m"]):
        super().__init__(job, V0)
        self._packed, self._steps = self.process.pack(self.state).clone(), torch.zeros((), dtype=torch.float64, device=V0.device)
        self._kept = (self.shown.clone(), self.stopped.clone(), self.alive.clone())
        own, start = self.stream, [tensor.clone() for tensor in (self._packed, self._steps, *self._kept)]
        # One step without the graph makes what kernels need on first use. Its random numbers are not the run's.
        self.stream = Stream(job.seed, job.block, kind="warm-up", dtype=V0.dtype, device=V0.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._write_step()
        torch.cuda.current_stream().wait_stream(side)
        self.stream, self._graph = own, torch.cuda.CUDAGraph()
        self._graph.register_generator_state(own.generator)
        with torch.cuda.graph(self._graph):
            self._write_step()
        for tensor, value in zip((self._packed, self._steps, *self._kept), start, strict=True):
            tensor.copy_(value)
        self.shown, self.stopped, self.alive = self._kept

    def take_step(self) -> None:
        self._graph.replay()

    def _write_step(self) -> None:
        self.shown, self.stopped, self.alive = self._kept
        self._steps.add_(1.0)
        self.state, happened = self.process.step(self.process.unpack(self._packed), self.stream)
        if happened is not None:
            raise RuntimeError("events are counted on the host")
        V = self.process.covariance(self.state)
        self.stop(V, self.job.bounds.crossed(V), self._steps * self.job.dt)
        self._packed.copy_(self.process.pack(self.state))
        for kept, new in zip(self._kept, (self.shown, self.stopped, self.alive), strict=True):
            kept.copy_(new)
