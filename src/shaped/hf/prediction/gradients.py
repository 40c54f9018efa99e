"""The gradients of a model at initialisation, drawn without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from operator import rshift
from typing import Any

import torch
from torch import Tensor

from shaped.covariance import gram
from shaped.gradients import Gradients
from shaped.gradients.chain import backpropagate_chain
from shaped.gradients.network import WeightlessLayer
from shaped.gradients.products import Products
from shaped.hf.prediction.embeddings import Start
from shaped.hf.prediction.parts import Block, Network
from shaped.hf.prediction.threads import Report, run_blocks
from shaped.layers import AttentionBranch, FeedForwardBranch, Norm, Sizes
from shaped.randomness import Stream

STREAM_ENTRIES, LOGIT_ENTRIES, BLOCK_SAMPLES = 2**19, 2**22, 64
"""Samples are drawn together up to so many entries of the residual stream and of the logits."""
MEMORY = 2**32
"""Bytes that all threads together keep, about."""


class Interrupted(Exception):
    """The run is to end."""


@dataclass(frozen=True, eq=False)
class GradientSimulation:
    """Everything that determines the gradients of a prediction. Calling it draws them."""

    network: Network
    start: Start
    norm: Norm | None
    """That of the embedding; None also where the tokens' covariance is given."""
    m: int
    samples: int
    seed: int
    dtype: torch.dtype
    device: torch.device
    threads: int
    progress: bool | None
    name: str

    def __call__(self) -> Gradients:
        network, m = self.network, self.m
        n, d, outputs = network.width, len(network.blocks), network.head.outputs
        size = max(1, min(BLOCK_SAMPLES, STREAM_ENTRIES // (m * n), LOGIT_ENTRIES // (m * outputs)))
        threads = max(1, min(self.threads, MEMORY // (size * self.count_bytes())))
        found = run_blocks(self.run_block, self.samples, size, 2 * d, threads, self.device, self.progress)
        entries = self.make_layers(torch.empty(1, 1, 1, dtype=self.dtype, device=self.device))[0].entries
        stds = [list_deviations(block) for block in network.blocks]
        weights = {name: found[name] / found[name].new_tensor([std[name] ** 2 for std in stds])[:, None] for name in entries}
        if not all(values.isfinite().all() for values in (found["loss"], found["tokens"], *weights.values())):
            raise ValueError(f"dtype must hold the numbers of the gradients, got {self.dtype} and a gradient that is not finite")
        info = {"name": self.name, "n": n, "d": d, "outputs": outputs, "tied": network.head.tied, "seed": self.seed}
        t = torch.arange(d + 1, dtype=torch.float64, device="cpu") / n
        V, never = found["V"].permute(2, 0, 1).contiguous(), found["loss"].new_full((self.samples,), torch.inf)
        return Gradients(t, found["tokens"], weights, dict(entries), found["loss"], V, never, info)

    def run_block(self, block: int, batch: int, report: Report) -> dict[str, Tensor]:
        """The samples of one block."""

        def advance() -> None:
            if not report():
                raise Interrupted

        forward, back = (
            Stream(self.seed, block, kind=f"prediction, {way}", dtype=self.dtype, device=self.device) for way in ("forward", "back")
        )
        products, head = Products(forward, back), self.network.head
        like = torch.empty(batch, 1, 1, dtype=self.dtype, device=self.device)
        X, rows = self.start.draw_tokens_and_rows(like, self.network.width, forward)
        if self.norm is not None:
            X = self.norm.apply(X)
        labels = head.draw_labels(batch, self.m, forward.generator)
        found = backpropagate_chain(self.make_layers(like), X, products, partial(head.find_loss, labels, rows), advance)
        parts = {**found.weights, "tokens": found.tokens, "loss": found.loss, "V": gram(found.last).permute(1, 2, 0)}
        return {name: values.double().cpu() for name, values in parts.items()}

    def make_layers(self, like: Tensor) -> list[WeightlessLayer]:
        """One for each block of the model; blocks that are the same object share theirs."""
        made: dict[int, WeightlessLayer] = {}
        for block in self.network.blocks:
            if id(block) not in made:
                made[id(block)] = WeightlessLayer(reduce(rshift, block), Sizes(self.network.width), like)
        return [made[id(block)] for block in self.network.blocks]

    def count_bytes(self) -> int:
        """What one sample keeps, about: the tokens of every layer, the graph of one layer, and the logits."""
        network, layers = self.network, self.network.blocks[0]
        features = sum(branch.features for layer in layers for branch, _ in layer.pairs)
        numbers = self.m * (len(network.blocks) * network.width + 8 * (network.width + features) + 6 * network.head.outputs)
        return numbers * torch.finfo(self.dtype).bits // 8


def list_deviations(block: Block) -> dict[str, float]:
    """The standard deviations of a block's matrices, by name. Those of the gradients' law are standard normals."""
    found: dict[str, Any] = {}
    for layer in block:
        for branch, _ in layer.pairs:
            if isinstance(branch, AttentionBranch):
                found |= {name: getattr(branch, name).std for name in ("query", "key", "value", "output")}
            elif isinstance(branch, FeedForwardBranch):
                found |= {"first": branch.inner.std, "gate": branch.inner.std, "second": branch.outer.std}
    return found
