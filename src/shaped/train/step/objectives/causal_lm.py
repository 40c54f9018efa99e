"""Causal language modelling: each token predicts the next one."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from shaped.hf.models import ShapedForCausalLM
from shaped.kernels.chunked_cross_entropy import sum_cross_entropy
from shaped.train.data.causal import CausalBatches, mask_documents
from shaped.train.data.prepared import Data
from shaped.train.step.objectives import Objective
from shaped.train.step.objectives.losses import Loss


class CausalLoss(Loss):
    """Cross-entropy of the next token. Logits are computed in chunks, so that they are never in memory at once."""

    def forward(self, ids: Tensor, labels: Tensor, count: Tensor, positions: Tensor | None = None) -> Tensor:
        """The sum over the labels, divided by `count`. With `positions`, which restart at each document, documents are kept apart.

        The mask of documents takes the place of the causal kernel's own, which is faster.
        """
        mask = None if positions is None else mask_documents(positions)
        return self._run["head"](self.encode(ids, mask, positions=positions), labels, count)

    def head(self, x: Tensor, labels: Tensor, count: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = self.model.scale_for_head(x if self.final is None else self.final(x))
        head = self.model.head  # its gradient is written in place, unless it is the embedding
        return sum_cross_entropy(x.flatten(0, 1), head.weight, labels.flatten(), getattr(head, "gradient", None)) / count


def make_batches(data: Data, part: str, settings: Any, **order: Any) -> CausalBatches:
    return CausalBatches.of(data, part, borders=settings.borders, **order)


def compute_metrics(loss: float, data: Data, settings: Any) -> dict[str, float]:
    """The loss in nats a token and, where the test text's bytes are known and every token of it is predicted, in bits a byte."""
    about = data.facts["valid"]
    if "bytes" not in about or settings.borders == "respect":  # the first tokens of documents are not predicted there
        return {"loss": loss}
    predictions = about["rows"] * (data.length - 1)
    return {"loss": loss, "bits_per_byte": loss / math.log(2) * predictions / about["bytes"]}


def select_inputs(batch: tuple[Tensor, ...]) -> dict[str, Any]:
    """Positions that restart at each document: without a cache, transformers keeps documents apart then. One token's logits are enough."""
    _, _, _, *positions = batch
    return {"logits_to_keep": 1, "use_cache": False} | ({"position_ids": positions[0]} if positions else {})


def weigh(batch: tuple[Tensor, ...]) -> Tensor | float:
    """By its labels, whose number differs between batches where the first tokens of documents have none."""
    _, _, count, *positions = batch
    return count if positions else 1.0


OBJECTIVE = Objective(
    model=ShapedForCausalLM, batches=make_batches, loss=CausalLoss, metrics=compute_metrics, inputs=select_inputs, weigh=weigh
)
