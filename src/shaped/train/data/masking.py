"""Masked batches as functions of (seed, step) alone, so that a resumed run, two processes or another device see the same ones.

The order of the rows is a permutation for each epoch; masks come from a hash of (seed, step, row of the batch, place), a counter-based
random generator. Every row has the same number of masked places, round(share·length): shapes never change, and the head is applied to
these places alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shaped.checks import in_range, whole_number
from shaped.train.data.prepare import Data

GOLDEN = 0x9E3779B97F4A7C15
PLACES, KINDS, WORDS = range(3)  # streams of random bits
KEPT, RANDOM = 1, 1  # of ten masked tokens, one stays as it is and one becomes a random one; eight become [MASK]


class Batches:
    """Rows of an array, shuffled anew each epoch, masked for language modelling.

    Args:
        rows: tokens, [rows, length].
        batch: rows of a step, over all processes.
        rank, world: this process takes the rank-th part of each batch.
    """

    def __init__(
        self,
        rows: np.ndarray,
        *,
        batch: int,
        seed: int,
        vocab: int,
        special: dict[str, int],
        share: float = 0.15,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
    ):
        in_range("share", share, 0.0, 1.0)
        if len(rows) < whole_number("batch", batch):
            raise ValueError(f"batch must be at most the number of rows, {len(rows)}, got {batch}")
        if batch % world:
            raise ValueError(f"batch must be a multiple of the number of processes, {world}, got {batch}")
        self.batch, self.length, self.seed, self.vocab = batch, rows.shape[1], seed, vocab
        self.mask, self.plain = special["[MASK]"], max(special.values()) + 1
        self.masked = max(1, round(share * self.length))
        self.steps_an_epoch = len(rows) // batch  # the last rows of an epoch that fill no batch are left out, other ones each time
        self.slots = torch.arange(rank * batch // world, (rank + 1) * batch // world, device=device)
        # All rows live on the device: a step then needs nothing from the host. int32 since few operations take uint16.
        self.rows = torch.from_numpy(np.asarray(rows).astype(np.int32)).to(device)
        self._epoch: tuple[int, np.ndarray] | None = None

    @classmethod
    def of(cls, data: Data, part: str, **how) -> Batches:
        return cls(data.rows(part), vocab=data.vocab, special=data.facts["special"], **how)

    def numbers(self, step: int) -> np.ndarray:
        """Which rows the batch of a step has, over all processes."""
        epoch, place = divmod(step, self.steps_an_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        return self._epoch[1][place * self.batch : (place + 1) * self.batch]

    def chunk(self, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The batches of `count` steps: masked tokens, [count, batch, length]; which places, and what was there, [count, batch, masked]."""
        chosen = torch.from_numpy(np.stack([self.numbers(step) for step in range(first, first + count)])).to(self.rows.device)
        tokens = self.rows[chosen[:, self.slots]].long()
        steps = torch.arange(first, first + count, device=tokens.device)
        # The least random numbers win; tokens like [CLS] come last, and are masked only in a row that has too few others.
        keys = (self._bits(steps, PLACES) >> 1 & (1 << 62) - 1) | (tokens < self.plain).long() << 62
        places = keys.topk(self.masked, largest=False).indices
        labels = tokens.gather(-1, places)
        kinds = (self._bits(steps, KINDS).gather(-1, places) >> 33 & (1 << 30) - 1) % 10
        words = self.plain + (self._bits(steps, WORDS).gather(-1, places) >> 33 & (1 << 30) - 1) % (self.vocab - self.plain)
        replaced = torch.where(kinds < KEPT, labels, torch.where(kinds < KEPT + RANDOM, words, self.mask))
        return tokens.scatter(-1, places, replaced), places, labels

    def _bits(self, steps: Tensor, stream: int) -> Tensor:
        """64 random bits for each step, slot and place, [steps, slots, length]: a hash of their numbers, the same on every device."""
        key = scramble(steps + _signed((3 * self.seed + stream) * GOLDEN))
        counters = self.slots[:, None] * self.length + torch.arange(self.length, device=steps.device)
        return scramble(key[:, None, None] + (counters + 1) * _signed(GOLDEN))


def scramble(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014) on int64, which wraps around as uint64 does."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """To the right, filling with zeros (int64 would fill with the sign)."""
    return x >> bits & (1 << 64 - bits) - 1


def _signed(x: int) -> int:
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x
