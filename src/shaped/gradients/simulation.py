"""backpropagate: gradients of random networks of finite width, exact in law, drawn without their weights."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor

from shaped import engine
from shaped.checks import check_bool, quote, whole_number
from shaped.gradients.block import BlockGradients, Job, Loss, run_block
from shaped.gradients.network import WeightlessLayer
from shaped.gradients.products import Products
from shaped.gradients.result import Gradients
from shaped.layers.base import Layer, Sizes, check_layer
from shaped.randomness import Stream

MEMORY = {"cpu": 2**30, "cuda": 2**33}
"""Bytes of the tensors that a block of networks keeps for its way back. glibc's allocator may waste half as much again."""
MOST = {"cpu": 2**12, "cuda": 2**15}
"""Networks in a block. A GPU takes many at the price of few: launching the operations takes the time."""


def backpropagate(
    layer: Layer,
    V0: Any,
    *,
    n: int,
    d: int,
    outputs: int,
    loss: Loss,
    samples: int | None = None,
    seed: int,
    n_k: int | None = None,
    upper: float | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float64,
    executor: Executor | None = None,
    progress: engine.Progress = None,
    independent: bool = False,
) -> Gradients:
    r"""Samples the gradients of a random network of width n and depth d, exactly in law, jointly with its loss.

    The network ends with a readout $X_d W/\sqrt{n}$. Forward and backward pass have the same weights, of which only the products are drawn.

    Args:
        layer: a layer or chain; d of them are stacked.
        V0: covariance of the tokens that enter, [m, m] or [samples, m, m], of rank n at most.
        n, d: width and depth.
        outputs: number of columns k of the readout.
        loss: a function of the outputs, [batch, m, k], that returns the loss of each network, [batch]; autograd differentiates it. Networks
            are independent, so each loss is a function of its own outputs.
        samples: number of networks; by default the number of matrices in V0.
        seed: the same seed gives the same numbers, whatever the executor.
        n_k: width of each head's keys; by default n divided by the number of heads.
        upper: a network stops where an eigenvalue of its covariance exceeds this; by default only what leaves the float range's safe part
            stops.
        device, dtype, progress: as in `solve`.
        executor: as in `solve`. The loss is pickled for it, so it is a function of a module.
        independent: draw new matrices for the backward pass. This assumption is common and wrong; it is here to be compared with.
    """
    options = engine.RunOptions(
        samples=samples,
        seed=seed,
        record="last",
        upper=upper,
        device=device,
        dtype=dtype,
        executor=executor,
        progress=progress,
    )
    sizes, d, outputs = Sizes(n, n_k), whole_number("d", d), whole_number("outputs", outputs)
    check_bool("independent", independent)
    check_layer(layer)
    check_callable(loss, executor is not None)
    m = engine.count_tokens(V0)
    engine.check_rank(V0, sizes.n)
    layer.check_sizes(sizes)
    V0 = engine.prepare_start(V0, options.samples, options.dtype).to(options.device)
    entries, kept = probe(layer, sizes, V0)
    size, segment = plan(kept, d, V0.device)
    count = len(V0)
    blocks = math.ceil(count / size)
    size = math.ceil(count / blocks)  # blocks of equal size: a small one takes as many operations

    def job(block: int) -> Job:
        start = engine.take_block(V0, block, size)
        return Job(layer, sizes, d, outputs, loss, start, engine.Bounds(options.upper, None), independent, segment, options.seed, block)

    whole = BlockGradients(
        engine.allocate((d + 1, count), dtype, V0.device),
        engine.allocate((len(entries), d, count), dtype, V0.device),
        torch.empty(count, dtype=dtype, device=V0.device),
        torch.empty(count, m, m, dtype=dtype, device=V0.device),
        torch.empty(count, dtype=torch.float64, device="cpu"),
    )
    for block, found in run_blocks(job, blocks, d, options):
        place = slice(block * size, (block + 1) * size)
        for part, into in zip(found, whole, strict=True):
            if into is whole.V:
                into[place] = part
            else:
                into[..., place] = part
    t = torch.arange(d + 1, dtype=torch.float64, device="cpu") / sizes.n
    info = {"n": sizes.n, "d": d, "outputs": outputs, "independent": independent, "seed": options.seed}
    weights = dict(zip(entries, whole.weights, strict=True))
    return Gradients(t, whole.tokens, weights, entries, whole.loss, whole.V, whole.stopped, info)


def run_blocks(job: Any, blocks: int, d: int, options: engine.RunOptions) -> Iterator[tuple[int, BlockGradients]]:
    """Every block's number and gradients, in any order."""
    with engine.progress_bar(options.progress, total=2 * d * blocks) as advance:
        if options.executor is None:
            for block in range(blocks):
                yield block, run_block(job(block), lambda: advance(1))
            return
        chunks = [range(block, block + 1) for block in range(blocks)]
        for block, arrays in engine.scatter(options.executor, run_pickled, engine.PickledChunks(chunks, job)):
            yield block, BlockGradients(*map(torch.from_numpy, arrays))
            advance(2 * d)


def run_pickled(jobs: bytes) -> list[Any]:
    """Runs a block in the worker's process."""
    (job,) = pickle.loads(jobs)
    return [part.cpu().numpy() for part in run_block(job)]


@torch.inference_mode(False)
@engine.without_autocast()
def probe(layer: Layer, sizes: Sizes, V0: Tensor) -> tuple[dict[str, int], float]:
    """The matrices of a layer with their numbers of entries, and the bytes that a network keeps for its way back through the layer.

    A layer that has no law for its gradients is refused here.
    """
    like = V0[:1].expand(2, -1, -1)
    stream = Stream(0, 0, kind="probe", dtype=V0.dtype, device=V0.device)
    network = WeightlessLayer(layer, sizes, like, like.shape[-1])
    X = network.draw_start(like, stream).requires_grad_()
    return network.entries, network.count_bytes(X, Products(stream, stream)) / 2


def plan(kept: float, d: int, device: torch.device) -> tuple[int, int]:
    """Networks in a block, and layers in a segment: as many networks as fit; where not even one does, one network and fewer layers."""
    budget, most = (limits.get(device.type, limits["cuda"]) for limits in (MEMORY, MOST))
    fits = budget / (kept * d)
    return min(most, max(1, int(fits))), d if fits >= 1 else max(1, int(budget / kept))


def check_callable(loss: object, pickled: bool) -> None:
    if not callable(loss):
        raise ValueError(f"loss must be a function of the outputs, [batch, m, k], that returns [batch], got {quote(loss)}")
    if not pickled:
        return
    try:
        pickle.dumps(loss)
    except Exception:
        raise ValueError(f"loss must be a function of a module, which can be pickled for an executor, got {loss!r}") from None
