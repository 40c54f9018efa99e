"""Batches of masked language modelling.

Masks come from a hash of (seed, step, row of the batch, place), a counter-based random generator. Every row has the same number of masked
places, round(share·length): shapes never change, and the head is applied to these places alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shaped.checks import in_range
from shaped.train.data.batches import Batches, load_rows
from shaped.train.data.prepared import Data

GOLDEN = 0x9E3779B97F4A7C15
PLACES, KINDS, WORDS = range(3)  # streams of random bits
KEPT, RANDOM = 1, 1  # of ten masked tokens, one stays as it is and one becomes a random one; eight become [MASK]


class MaskedBatches(Batches):
    """Rows of tokens, [rows, length], masked for language modelling. `share` of each row's tokens are masked, at least one.

    The other arguments are those of `Batches`.
    """

    def __init__(self, rows: np.ndarray, *, vocab: int, special: dict[str, int], share: float = 0.15, **order: Any):
        in_range("share", share, 0.0, 1.0)
        super().__init__(len(rows), **order)
        self.length, self.vocab = rows.shape[1], vocab
        self.mask, self.plain = special["[MASK]"], max(special.values()) + 1
        self.masked = max(1, round(share * self.length))
        self.rows = load_rows(rows, self.device)

    @classmethod
    def of(cls, data: Data, part: str, **how: Any) -> MaskedBatches:
        return cls(data.rows(part), vocab=data.vocab, special=data.facts["special"], **how)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.length, self.masked, self.batch

    def chunk(self, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Masked tokens, [count, batch, length]; the masked places and the tokens that were there, [count, batch, masked]."""
        tokens = self.rows[self.select(first, count)].long()
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
