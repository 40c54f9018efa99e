"""Batches of causal language modelling: each token of a row predicts the next one.

With `borders="respect"` a token attends only within its own document, and positions restart at each document. `[SEP]` is the last token of
a document. What follows it is another document, so it has no label: the first token of a document is not predicted, except that of a row,
from `[CLS]`. The first document of a row is usually the rest of one that began in another row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shaped.kernels.chunked_cross_entropy import IGNORED
from shaped.train.data.batches import Batches, load_rows
from shaped.train.data.prepared import Data
from shaped.train.data.tokenizer import END

BORDERS = ("ignore", "respect")


class CausalBatches(Batches):
    """Rows of tokens, [rows, length], each token with the next one as its label.

    `end` is the id of `[SEP]`. The other arguments are those of `Batches`.
    """

    def __init__(self, rows: np.ndarray, *, end: int, borders: str = "ignore", world: int = 1, **order: Any):
        if borders not in BORDERS:
            raise ValueError(f"borders must be one of {', '.join(BORDERS)}, got {borders!r}")
        super().__init__(len(rows), world=world, **order)
        self.length, self.end, self.respects, self._world = rows.shape[1], end, borders == "respect", world
        self.rows = load_rows(rows, self.device)

    @classmethod
    def of(cls, data: Data, part: str, **how: Any) -> CausalBatches:
        return cls(data.rows(part), end=data.facts["special"][END], **how)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.length, self.respects, self.batch

    def chunk(self, first: int, count: int) -> tuple[Tensor, ...]:
        """Tokens and labels, [count, batch, length]; the number of labels, [count]; with borders also positions, [count, batch, length].

        The number of labels is the mean over all processes: the mean of their losses is then the loss of the whole batch.
        """
        tokens = self.rows[self.select(first, count)].long()
        labels = torch.nn.functional.pad(tokens[..., 1:], (0, 1), value=IGNORED)
        if not self.respects:
            labelled = self.batch * (self.length - 1) / self._world
            return tokens, labels, torch.full((count,), labelled, device=tokens.device)
        labels = labels.masked_fill(tokens == self.end, IGNORED)
        # The rows of the whole batch, because processes have different numbers of borders.
        numbers = np.stack([self.numbers(step) for step in range(first, first + count)])
        whole = self.rows[torch.from_numpy(numbers).to(self.device)]
        labelled = (whole[..., :-1] != self.end).sum((-1, -2)) / self._world
        return tokens, labels, labelled.float().clamp(min=1.0), find_positions(tokens, self.end)


def find_positions(tokens: Tensor, end: int) -> Tensor:
    """Each token's position in its own document: the distance from the last document's end."""
    places = torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens)
    starts = torch.nn.functional.pad(tokens[..., :-1] == end, (1, 0)) * places
    return places - starts.cummax(-1).values


def mask_documents(positions: Tensor) -> Tensor:
    """Which tokens are of the same document, [batch, 1, m, m], from the positions, which are 0 where a document begins."""
    documents = (positions == 0).cumsum(-1)
    return (documents[:, :, None] == documents[:, None, :])[:, None]
