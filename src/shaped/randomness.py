"""Random streams, one for each block of samples, so that results do not depend on how blocks are distributed."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

StreamState = tuple[Any, Tensor]


class Normals(ABC):
    """A source of independent standard normal numbers."""

    @abstractmethod
    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""

    def fork(self) -> Normals:
        """An independent source for draws that only some samples need. Forking leaves the draws of the other samples unchanged."""
        return self

    def square(self, L: Float[Tensor, "*batch m k"]) -> Float[Tensor, "*batch k k"]:
        """Square matrices G of normals for products L G."""
        return self.matrices(L, L.shape[-1], L.shape[-1])

    def matrices(self, like: Float[Tensor, "*batch _ _"], rows: int, columns: int) -> Float[Tensor, "*batch {rows} {columns}"]:
        """Matrices of normals, one for each sample of `like`, in the memory layout of `like`."""
        if like.ndim == 3 and like.stride(0) == 1:
            return self.normal(rows, columns, len(like)).permute(2, 0, 1)
        return self.normal(*like.shape[:-2], rows, columns)

    def triangles(self, like: Float[Tensor, "batch _ _"], size: int) -> Float[Tensor, "batch {size} {size}"]:
        """Lower triangular matrices of normals, one for each sample of `like`, in the memory layout of `like`."""
        below = torch.tril_indices(size, size, device=like.device)
        T = like.new_zeros(size * size, len(like))
        T.index_copy_(0, size * below[0] + below[1], self.normal(below.shape[1], len(like)))
        T = T.view(size, size, len(like)).permute(2, 0, 1)
        return T if like.stride(0) == 1 else T.contiguous()


class GeneratorNormals(Normals):
    """Normals from a torch.Generator that the caller owns, in the precision of `like`."""

    def __init__(self, generator: torch.Generator, like: Tensor):
        self._generator, self._dtype = generator, like.dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=self._dtype, device=self._generator.device)


class Recorded(Normals):
    """Draws from a source and records the draws in order."""

    def __init__(self, source: Normals):
        self._source, self.drawn = source, list[Tensor]()

    def normal(self, *shape: int) -> Tensor:
        self.drawn.append(self._source.normal(*shape))
        return self.drawn[-1].clone()  # callers may write to it in place

    def fork(self) -> Normals:
        return self._source


class Summed(Normals):
    """The normals of a whole step from those of its two halves: (one + other)/sqrt(2). New ones where the halves' shapes differ."""

    def __init__(self, source: Normals, one: Recorded, other: Recorded):
        self._source, self._halves = source, list(zip(one.drawn, other.drawn, strict=False))

    def normal(self, *shape: int) -> Tensor:
        if self._halves and self._halves[0][0].shape == self._halves[0][1].shape == shape:
            one, other = self._halves.pop(0)
            return (one + other).mul_(math.sqrt(0.5))
        return self._source.normal(*shape)

    def fork(self) -> Normals:
        return self._source


class Stream(Normals):
    """The random numbers of one block of samples. They depend only on the seed, the block's number, the kind of process, the kind of
    device and the dtype.

    On the CPU numpy draws float64 and torch draws float32, each twice as fast as the other (benchmarks/limit.py, benchmarks/finite.py).
    torch's CPU generator keeps only 32 bits of a seed. So blocks get consecutive seeds, and no two blocks of a run share one.
    """

    def __init__(self, seed: int, block: int, *, kind: str = "", dtype: torch.dtype, device: torch.device):
        self._make_fork = lambda: Stream(seed, block, kind=f"{kind}, apart", dtype=dtype, device=device)
        self._forked: Stream | None = None
        salt = zlib.crc32(kind.encode())  # SDE and network get independent numbers from the same seed
        sequence = np.random.SeedSequence(seed, spawn_key=(salt, block))
        self._dtype, self._device = dtype, device
        self._numpy = np.random.Generator(np.random.SFC64(sequence))
        self._torch = torch.Generator(device=device)
        if device.type == "cpu":
            first = int(np.random.SeedSequence(seed, spawn_key=(salt,)).generate_state(1)[0])
            self._torch.manual_seed((first + block) % 2**32)
        else:
            self._torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0]) >> 1)  # torch takes seeds below 2^63

    def fork(self) -> Stream:
        self._forked = self._forked or self._make_fork()
        return self._forked

    def normal(self, *shape: int) -> Tensor:
        return self.fill(torch.empty(shape, dtype=self._dtype, device=self._device))

    def fill(self, buffer: Float[Tensor, ...]) -> Float[Tensor, ...]:
        """Standard normal numbers, in place: a contiguous buffer that is used again stays in the cache."""
        if self._device.type == "cpu" and self._dtype == torch.float64:
            self._numpy.standard_normal(out=buffer.numpy())
            return buffer
        return buffer.normal_(generator=self._torch)

    def save_state(self) -> StreamState:
        """Where the stream is. Its fork has no part in it."""
        return self._numpy.bit_generator.state, self._torch.get_state()

    def rewind(self, state: StreamState) -> None:
        """Back to a saved state: the same numbers follow again."""
        self._numpy.bit_generator.state = state[0]
        self._torch.set_state(state[1])

    @property
    def generator(self) -> torch.Generator:
        """torch's generator, which a CUDA graph must know."""
        return self._torch

    def bartlett(self, like: Float[Tensor, "batch _ _"], size: int, degrees: int) -> Float[Tensor, "batch {size} root"]:
        """T with T Tᵀ ~ Wishart(I, degrees), the law of Z Zᵀ for a size x degrees matrix Z of normals, at a cost independent of `degrees`.

        Bartlett's lower triangular T: normals below the diagonal, on it the roots of chi-squared numbers with `degrees`,
        `degrees` - 1, … degrees of freedom. For fewer degrees than rows it returns Z, which is then smaller.
        """
        if degrees < size:
            return self.matrices(like, size, degrees)
        T = like.new_zeros(size, size, len(like))
        below = _places_below_diagonal(size, like.device)
        T.view(size * size, len(like)).index_copy_(0, below, self.normal(len(below), len(like)))
        T.diagonal(dim1=0, dim2=1).copy_((2.0 * self._gamma((degrees - np.arange(size)) / 2.0, len(like))).sqrt_().T)
        T = T.permute(2, 0, 1)
        return T if like.stride(0) == 1 else T.contiguous()

    def rows(self, like: Float[Tensor, "batch _ _"], size: int, degrees: int) -> Float[Tensor, "batch {size} {degrees}"]:
        """The matrix Z of normals that `bartlett` replaces, for a law that tells its columns apart."""
        return self.matrices(like, size, degrees)

    def _gamma(self, shapes: Float[np.ndarray, " row"], count: int) -> Float[Tensor, "row {count}"]:
        """Gamma numbers with these shape parameters, `count` of each, in double precision."""
        if self._device.type == "cpu":
            return torch.from_numpy(self._numpy.standard_gamma(shapes[:, None], (len(shapes), count)))
        wanted = _copy_to_device(tuple(shapes), self._device)[:, None].expand(-1, count)
        return torch.ops.aten._standard_gamma(wanted, self._torch)  # torch.distributions takes no generator


@lru_cache(maxsize=64)
def _places_below_diagonal(size: int, device: torch.device) -> Int[Tensor, " below"]:
    """Of a matrix that is a vector, row by row."""
    with torch.inference_mode(False):  # kept for calls out of it
        rows, columns = torch.tril_indices(size, size, -1, device=device)
        return size * rows + columns


@lru_cache(maxsize=256)
def _copy_to_device(numbers: tuple[float, ...], device: torch.device) -> Float[Tensor, " numbers"]:
    """Copied once: while a CUDA graph is captured, nothing may be copied from the host."""
    with torch.inference_mode(False):  # kept for calls out of it
        return torch.tensor(numbers, dtype=torch.float64, device=device)
