"""Streams of random numbers: one for each block of samples, so that results do not depend on how the work was cut."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


class Normals(ABC):
    """A source of independent standard normal numbers."""

    @abstractmethod
    def square(self, L: Float[Tensor, "*batch m k"]) -> Float[Tensor, "*batch k k"]:
        """Square matrices for a product with L from the right."""


class GeneratorNormals(Normals):
    """Normals from a torch.Generator that the caller owns."""

    def __init__(self, generator: torch.Generator):
        self._generator = generator

    def square(self, L: Float[Tensor, "*batch m k"]) -> Float[Tensor, "*batch k k"]:
        shape = (*L.shape[:-2], L.shape[-1], L.shape[-1])
        return torch.randn(shape, generator=self._generator, dtype=L.dtype, device=L.device)


class Stream(Normals):
    """The normals of one block of samples: a function of the seed, the block's number and the kind of device alone.

    On the CPU numpy draws them, because its ziggurat takes less than half of torch.randn's time in double precision
    (benchmarks/limit.py) and because torch's CPU generator keeps only 32 bits of a seed.
    """

    def __init__(self, seed: int, block: int, *, dtype: torch.dtype, device: torch.device):
        sequence = np.random.SeedSequence(seed, spawn_key=(block,))
        self._dtype, self._device = dtype, device
        if device.type == "cpu":
            self._numpy = np.random.Generator(np.random.SFC64(sequence))
            self._torch = None
        else:
            state = int(sequence.generate_state(1, np.uint64)[0]) >> 1  # torch takes seeds below 2^63
            self._torch = torch.Generator(device=device).manual_seed(state)

    def normal(self, *shape: int) -> Tensor:
        if self._torch is not None:
            return torch.randn(shape, generator=self._torch, dtype=self._dtype, device=self._device)
        drawn = np.float64 if self._dtype == torch.float64 else np.float32
        return torch.from_numpy(self._numpy.standard_normal(shape, dtype=drawn)).to(self._dtype)

    def square(self, L: Float[Tensor, "batch m k"]) -> Float[Tensor, "batch k k"]:
        batch, _, k = L.shape
        return self.normal(k, k, batch).permute(2, 0, 1) if L.stride(0) == 1 else self.normal(batch, k, k)
