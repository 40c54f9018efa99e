"""Masked language modelling, the paper's objective."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from shaped.hf.models import ShapedForMaskedLM
from shaped.train.data.masking import MaskedBatches
from shaped.train.data.prepared import Data
from shaped.train.step.objectives import Objective
from shaped.train.step.objectives.losses import Loss


class MaskedLoss(Loss):
    """Cross-entropy of masked language modelling. The last feed-forward branch and the vocabulary's matrix see the masked places alone."""

    def forward(self, ids: Tensor, places: Tensor, labels: Tensor) -> Tensor:
        return self._run["head"](self.encode(ids, places=places), labels)

    def head(self, x: Tensor, labels: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = x if self.final is None else self.final(x)
        return cross_entropy(self.model.logits(x).float().flatten(0, 1), labels.flatten())


def make_batches(data: Data, part: str, settings: Any, **order: Any) -> MaskedBatches:
    return MaskedBatches.of(data, part, share=settings.mask_share, **order)


OBJECTIVE = Objective(
    model=ShapedForMaskedLM,
    batches=make_batches,
    loss=MaskedLoss,
    metrics=lambda loss, data, settings: {"loss": loss},
    inputs=lambda batch: {},
)
