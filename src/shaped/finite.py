"""propagate: random networks of finite width, exact in law, drawn without their weights."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from shaped import engine
from shaped.checks import quote, whole_number
from shaped.covariance import Point, gram, is_for_blas
from shaped.layers.base import Layer, Sizes, check_layer
from shaped.randomness import Stream
from shaped.trajectory import Trajectory

PATHS = ("auto", "gram", "tokens")


@dataclass(frozen=True, eq=False)
class GramSteps(engine.PointProcess):
    """The Markov chain of covariances. The cost of attention does not depend on n; a feed-forward layer draws m·n normals."""

    kind: ClassVar[str] = "gram"
    layer: Layer
    sizes: Sizes

    def step(self, state: Point, stream: Stream) -> tuple[Point, None]:
        return self.layer.advance_gram(state, self.sizes, stream), None

    def is_capturable(self, V0: Float[Tensor, "batch m m"]) -> bool:
        return not is_for_blas(V0)  # else `factor` reads back whether tokens coincide

    def count_entries(self, m: int) -> int:
        return self.layer.count_entries(m)


@dataclass(frozen=True, eq=False)
class TokenSteps(engine.Process[Tensor]):
    """The Markov chain of tokens, [batch, m, n], for layers that use single features."""

    kind: ClassVar[str] = "tokens"
    layer: Layer
    sizes: Sizes

    def start(self, V0: Float[Tensor, "batch m m"], stream: Stream) -> Tensor:
        return engine.draw_start(V0, self.sizes.n, stream)

    def step(self, state: Tensor, stream: Stream) -> tuple[Tensor, None]:
        return self.layer.advance_tokens(state, self.sizes, stream), None

    def covariance(self, state: Tensor) -> Float[Tensor, "batch m m"]:
        return gram(state)

    def pack(self, state: Tensor) -> Tensor:
        return state

    def unpack(self, packed: Tensor) -> Tensor:
        return packed

    def is_capturable(self, V0: Float[Tensor, "batch m m"]) -> bool:
        return not is_for_blas(V0)  # else `factor` reads back whether tokens coincide

    def count_entries(self, m: int) -> int:
        return max(m * self.sizes.n, self.layer.count_entries(m))


def propagate(
    layer: Layer,
    V0: Any,
    *,
    n: int,
    d: int,
    samples: int | None = None,
    seed: int,
    n_k: int | None = None,
    path: str = "auto",
    record: engine.Record = "all",
    upper: float | None = None,
    lower: float | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float64,
    chunk: int | None = None,
    executor: Executor | None = None,
    progress: engine.Progress = None,
) -> Trajectory:
    """Samples the covariance V = XXᵀ/n through d layers of a random network of width n, exactly in law, at time t = layer/n.

    Given the tokens, a product with a Gaussian weight matrix is drawn directly: m·n normals, no weights. Without LayerNorm the
    covariances are a Markov chain by themselves, and even the tokens are not made (`info["path"]` says which).

    Args:
        layer: a layer or chain; d of them are stacked.
        V0: covariance of the tokens that enter, [m, m] or [samples, m, m], of rank n at most: n features have no other.
        n, d: width and depth.
        samples: number of networks; by default the number of matrices in V0.
        seed: the same seed gives the same numbers, whatever the chunk size or the number of workers.
        n_k: width of each head's keys; by default n divided by the number of heads.
        path: "gram" (covariances alone), "tokens", or "auto": "gram" where the layers allow it and there are as many features as tokens.
        record, upper, lower, device, dtype, chunk, executor, progress: as in `solve`.
    """
    options = engine.RunOptions(
        samples=samples,
        seed=seed,
        record=record,
        upper=upper,
        lower=lower,
        device=device,
        dtype=dtype,
        chunk=chunk,
        executor=executor,
        progress=progress,
    )
    sizes, d = Sizes(n, n_k), whole_number("d", d)
    if path not in PATHS:
        raise ValueError(f"path must be one of {', '.join(map(repr, PATHS))}, got {quote(path)}")
    check_layer(layer)
    engine.check_rank(V0, sizes.n)
    layer.check_sizes(sizes)
    if path == "gram" and layer.needs_tokens:
        raise ValueError(f"path must be 'tokens' or 'auto' for {layer!r}, which looks at single features, got 'gram'")
    m = engine.count_tokens(V0)
    if path == "gram" and m > sizes.n:
        raise ValueError(f"path must be 'tokens' or 'auto' for {m} tokens of n = {sizes.n} features, got 'gram'")
    # X has only n columns there: F Z is nowhere across X, and a square factor of V would give F Z m columns in place of n.
    by_tokens = layer.needs_tokens or path == "tokens" or m > sizes.n
    process = TokenSteps(layer, sizes) if by_tokens else GramSteps(layer, sizes)
    return engine.run(
        process, V0, options, steps=d, dt=1.0 / sizes.n, info={"path": "tokens" if by_tokens else "gram", "n": sizes.n, "d": d}
    )
