"""One block of networks: forward through all layers, the loss, and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from shaped import engine
from shaped.gradients.network import WeightlessLayer
from shaped.gradients.products import Products
from shaped.layers.base import Layer, Sizes
from shaped.randomness import Stream

Loss = Callable[[Tensor], Tensor]
Pass = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Through one layer: the tokens that enter, those that leave, and the weights that were drawn."""


@dataclass(frozen=True, eq=False)
class Job:
    """Everything that determines the gradients of one block of networks."""

    layer: Layer
    sizes: Sizes
    d: int
    outputs: int
    loss: Loss
    V0: Float[Tensor, "batch m m"]
    bounds: engine.Bounds
    independent: bool
    segment: int
    """How many layers' graphs are kept at a time. The others are run again on the way back. It changes no number."""
    seed: int
    block: int


class BlockGradients(NamedTuple):
    tokens: Tensor
    weights: Tensor
    """[name, layer, sample]"""
    loss: Tensor
    V: Tensor
    stopped: Tensor


class Networks:
    """The networks of one block between two layers.

    One whose tokens leave the range goes on from its start, and nobody reads it.
    """

    def __init__(self, job: Job):
        self.job, self.layer = job, WeightlessLayer(job.layer, job.sizes, job.V0, job.V0.shape[-1])
        self.products = Products(make_stream(job, "gradients"), make_stream(job, "gradients, backward"), job.independent)
        self.start = self.layer.draw_start(job.V0, self.products.forward)
        self.shown = job.V0
        self.end = torch.where(job.bounds.crossed(job.V0), 0, job.d + 1)
        """The layer after which each network stopped; d + 1 if none."""
        self.running = int(self.is_running(0).sum())

    def run_layer(self, number: int, X: Tensor, watch: bool) -> tuple[Pass, Tensor]:
        """Through layer `number`, and the tokens for the next one. The first time (`watch`) networks may stop."""
        X = X.detach().requires_grad_()
        Y, drawn = self.layer.run(X, self.products)
        after = Y.detach()
        if watch:
            self.stop(number, self.layer.find_covariance(after))
        return (X, Y, drawn), after if self.running == len(X) else torch.where(self.is_running(number)[:, None, None], after, self.start)

    def stop(self, number: int, V: Float[Tensor, "batch m m"]) -> None:
        """Stops the networks whose covariance V after layer `number` is out of range."""
        crossed = self.job.bounds.crossed(V)
        if self.running == len(V) and not crossed.any():
            self.shown = V
            return
        before = self.is_running(number)
        self.shown = torch.where((before & V.isfinite().all(-1).all(-1))[:, None, None], V, self.shown)
        self.end = torch.where(before & crossed, number, self.end)
        self.running = int(self.is_running(number).sum())

    def is_running(self, number: int) -> Tensor:
        """After layer `number`."""
        return self.end > number

    def find_loss(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """The losses, and their gradients with respect to the last tokens."""
        X = X.detach().requires_grad_()
        outputs = self.layer.read_out(X, self.job.outputs, self.products)
        loss, running = check_loss(self.job.loss(outputs), outputs), self.is_running(self.job.d)
        if not loss[running].isfinite().all():
            raise ValueError(f"loss must be finite, got {loss[running & ~loss.isfinite()][0].item()}")
        check_separate(loss, outputs, running)
        (D,) = torch.autograd.grad(loss.sum(), X)
        seen = D[running]
        if not seen.isfinite().all():
            raise ValueError(f"loss must have a finite gradient, which a square root of 0 has not, got {seen[~seen.isfinite()][0].item()}")
        self.products.squares.clear()
        return loss.detach(), D

    def go_back(self, through: Pass, D: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradient with respect to the tokens that entered, and the squared norms of those with respect to the weights."""
        return self.products.go_back(*through, D)


@torch.inference_mode(False)  # the caller may be without gradients; these are ours
@engine.without_autocast()
@engine.use_one_thread()
def run_block(job: Job, advance: Callable[[], None] = lambda: None) -> BlockGradients:
    """Runs one block. `advance` is called 2d times: after each layer, forward and backward."""
    networks, d = Networks(job), job.d
    X, forward = networks.start, networks.products.forward
    firsts = range(0, d, job.segment)
    saved, passes = [], list[Pass]()
    for number in range(d):
        keep = number >= firsts[-1]
        if number in firsts:
            saved.append((X, forward.save_state()))
        with torch.set_grad_enabled(keep):
            through, X = networks.run_layer(number + 1, X, watch=True)
        if keep:
            passes.append(through)
        del through
        advance()
    loss, D = networks.find_loss(X)
    tokens = X.new_empty(d + 1, len(X))
    weights = X.new_zeros(len(networks.layer.entries), d, len(X))
    tokens[d] = D.square().sum((-2, -1))
    place = {name: i for i, name in enumerate(networks.layer.entries)}
    for first in reversed(firsts):
        if not passes:
            X, state = saved.pop()
            forward.rewind(state)
            for number in range(first, min(first + job.segment, d)):
                through, X = networks.run_layer(number + 1, X, watch=False)
                passes.append(through)
        else:
            saved.pop()
        while passes:
            number = first + len(passes) - 1
            D, squares = networks.go_back(passes.pop(), D)
            tokens[number] = D.square().sum((-2, -1))
            for name, square in squares.items():
                weights[place[name], number] = square
            advance()
    lost = ~networks.is_running(d)
    for values in (tokens, weights, loss):
        values[..., lost] = torch.nan
    stopped = torch.where(lost, networks.end / job.sizes.n, math.inf)
    return BlockGradients(tokens, weights, loss, networks.shown, stopped)


def make_stream(job: Job, kind: str) -> Stream:
    return Stream(job.seed, job.block, kind=kind, dtype=job.V0.dtype, device=job.V0.device)


def check_loss(loss: object, outputs: Tensor) -> Tensor:
    """The losses, if they are one number for each network that autograd can differentiate."""
    if not isinstance(loss, Tensor) or loss.shape != outputs.shape[:1]:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(f"loss must return one number for each network, [{len(outputs)}] for outputs {tuple(outputs.shape)}, got {got}")
    if not loss.requires_grad:
        raise ValueError("loss must be differentiable: compute it with torch, without detach, item or argmax")
    return loss


def check_separate(loss: Float[Tensor, " batch"], outputs: Tensor, running: Tensor) -> None:
    """Raises a ValueError where the loss of one network has a gradient in another's outputs.

    The losses are weighed: then a network's own gradient is multiplied by its own weight. Powers of 2 make no rounding errors.
    """
    powers = torch.randint(4, (len(loss),), generator=torch.Generator().manual_seed(0), device="cpu")
    weights = (2.0**powers).to(loss)
    (plain,) = torch.autograd.grad(loss.sum(), outputs, retain_graph=True)
    (weighed,) = torch.autograd.grad((weights * loss).sum(), outputs, retain_graph=True)
    expected = weights[:, None, None] * plain
    mixed = (weighed - expected).abs().amax((-2, -1)) > torch.finfo(loss.dtype).eps ** 0.75 * expected.abs().amax((-2, -1))
    if (mixed & running).any():
        raise ValueError(
            "loss must keep networks apart, each number a function of its own outputs [m, k], "
            f"got one that mixes the {len(loss)} of its first dimension"
        )
