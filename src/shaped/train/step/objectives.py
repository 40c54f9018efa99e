"""What is trained: the models of `shaped.hf` without what training has no use for: caches, full masks, logits that nobody reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shaped.hf.models import ShapedForMaskedLM, ShapedForSequenceClassification, ShapedModel
from shaped.kernels.side_stream import SideStream
from shaped.train.step.fused_block import FusedBlock, can_fuse

COMPILE = ("off", "blocks", "whole")


class Loss(nn.Module, ABC):
    """A loss in three parts, each of which can be compiled by itself: embedding, blocks, head.

    When blocks are compiled one by one, all but the last share one program, so that depth costs no time at the start; shaped blocks are
    fused instead where they can be. `stream` is the precision of the tokens between the blocks.
    """

    def __init__(self, model: nn.Module, body: ShapedModel, compile: str = "off", stream: torch.dtype = torch.float32):
        super().__init__()
        self.stream = stream
        self.model: Any = model
        self.embedding, self.final = body.embedding, body.norm
        run = (lambda part: torch.compile(part, dynamic=False, fullgraph=True)) if compile == "blocks" else (lambda part: part)
        blocks: list[Any] = [layer.block for layer in body.layers]
        if compile == "blocks" and can_fuse(blocks):
            side_stream = SideStream()
            blocks = [FusedBlock(block, run(block), side_stream, last=block is blocks[0]) for block in blocks]
        else:
            blocks = [run(block) for block in blocks]
        # Not as submodules: these are the model's own, which has them already.
        self._run: dict[str, Any] = {"embed": run(self.embed), "head": run(self.head), "blocks": blocks}

    def encode(self, ids: Tensor, mask: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        """The last layer's tokens; only those at `places`, [batch, k], where that is given, and only for them its feed-forward branch."""
        x, blocks = self._run["embed"](ids), self._run["blocks"]
        for block in blocks[:-1]:
            x = block(x, mask)
        return blocks[-1](x, mask, None, places)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(self.embedding.tokens(ids), torch.arange(ids.shape[-1], device=ids.device)[None], None).to(self.stream)

    @abstractmethod
    def head(self, *parts: Tensor) -> Tensor:
        """The loss, from the last layer's tokens, what else it needs of them, and the labels."""


class MaskedLoss(Loss):
    """Cross-entropy of masked language modelling. The last feed-forward branch and the vocabulary's matrix see the masked places alone."""

    def __init__(self, model: ShapedForMaskedLM, compile: str = "off", stream: torch.dtype = torch.float32):
        super().__init__(model, model.model, compile, stream)

    def forward(self, ids: Tensor, places: Tensor, labels: Tensor) -> Tensor:
        return self._run["head"](self.encode(ids, places=places), labels)

    def head(self, x: Tensor, labels: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = x if self.final is None else self.final(x)
        return cross_entropy(self.model.logits(x).float().flatten(0, 1), labels.flatten())


class ClassifierLoss(Loss):
    """Cross-entropy of a classifier of texts that are padded to one length."""

    def __init__(self, model: ShapedForSequenceClassification, compile: str = "off", stream: torch.dtype = torch.float32):
        super().__init__(model, model.model, compile, stream)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return self._run["head"](self.encode(ids, mask[:, None, None, :]), mask, labels)

    def head(self, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return cross_entropy(self.logits(x, mask).float(), labels)

    def logits(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x if self.final is None else self.final(x)
        return self.model.classifier(self.model.pooled(x, mask))
