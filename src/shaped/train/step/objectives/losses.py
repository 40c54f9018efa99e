"""Losses for the training step: the models of `shaped.hf` without caches, full masks and unused logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from shaped.hf.models import ShapedModel
from shaped.kernels.side_stream import SideStream
from shaped.nn.rotary import Rotation
from shaped.train.step.fused_block import FusedBlock, can_fuse


class Loss(nn.Module, ABC):
    """A loss in three parts, each of which can be compiled by itself: embedding, blocks, head.

    When blocks are compiled one by one, all but the last share one program, so that depth costs no time at the start. Where it can, a
    fused block takes the place of a compiled one. `stream` is the dtype of the tokens between the blocks.
    """

    def __init__(self, model: Any, compile: str = "off", stream: torch.dtype = torch.float32):
        """`model`: a model of `shaped.hf` with a head."""
        super().__init__()
        self.stream, self.model = stream, model
        body: ShapedModel = model.model
        self.embedding, self.final, self.rotate = body.embedding, body.norm, body.rotate
        run = (lambda part: torch.compile(part, dynamic=False, fullgraph=True)) if compile == "blocks" else (lambda part: part)
        blocks: list[Any] = [layer.block for layer in body.layers]
        if compile == "blocks" and can_fuse(blocks):
            side_stream = SideStream()
            blocks = [FusedBlock(block, run(block), side_stream, last=block is blocks[0]) for block in blocks]
        else:
            blocks = [run(block) for block in blocks]
        # In a dict, so that they are not registered as submodules twice: the model has them already.
        self._run: dict[str, Any] = {"embed": run(self.embed), "head": run(self.head), "blocks": blocks}

    def encode(self, ids: Tensor, mask: Tensor | None = None, places: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """The last layer's tokens. With `places`, [batch, k], only those: its feed-forward branch then sees no others.

        `positions`, [batch, m], are 0 to m - 1 by default.
        """
        x, rotation = self._run["embed"](ids, positions)
        blocks = self._run["blocks"]
        for block in blocks[:-1]:
            x = block(x, mask, None, None, rotation)
        return blocks[-1](x, mask, None, places, rotation)

    def embed(self, ids: Tensor, positions: Tensor | None) -> tuple[Tensor, Rotation | None]:
        """The embedded tokens, and the rotation of their queries and keys."""
        positions = torch.arange(ids.shape[-1], device=ids.device)[None] if positions is None else positions
        return self.embedding(self.embedding.tokens(ids), positions, None).to(self.stream), self.rotate(positions)

    @abstractmethod
    def head(self, *parts: Tensor) -> Tensor:
        """The loss, from the last layer's tokens, what else it needs of them, and the labels."""
