"""Classification of texts, for fine-tuning: the loss and batches of `shaped glue`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from shaped.train.data.batches import Batches
from shaped.train.step.objectives.losses import Loss


class ExampleBatches(Batches):
    """Examples that are tensors already: tokens [examples, length], mask, labels. Arguments as those of `Batches`."""

    def __init__(self, examples: tuple[Tensor, ...], **order: Any):
        super().__init__(len(examples[0]), **order)
        self.examples = tuple(tensor.to(self.device) for tensor in examples)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.examples[0].shape[1], self.batch

    def chunk(self, first: int, count: int) -> tuple[Tensor, ...]:
        chosen = self.select(first, count)
        return tuple(tensor[chosen] for tensor in self.examples)


class ClassifierLoss(Loss):
    """Cross-entropy of a classifier of texts that are padded to one length."""

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return self._run["head"](self.encode(ids, mask[:, None, None, :]), mask, labels)

    def head(self, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return cross_entropy(self.logits(x, mask).float(), labels)

    def logits(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x if self.final is None else self.final(x)
        return self.model.classifier(self.model.pool(x, mask))
