"""Checks of a layer's drift: networks of three widths, extrapolated to infinite width.

At a finite width n·E[V' - V] is a series in n^(-1/2), b + c₁/sqrt(n) + c₂/n + …, since the slopes of a shaped activation and the logits'
temperature are. Attention has c₁ = 0: the expectation is even in the logits, and they are of order n^(-1/2). So has an activation
s·φ(x/s) with s = a·sqrt(n), whose expectation is even in 1/s. A feed-forward layer with slopes 1 + c_plus/sqrt(n) and 1 + c_minus/sqrt(n)
has exactly b/(a² + e²), a ± e being the slopes, so that c₁ = -(c_plus + c_minus)·b: it is 0 only where c_plus = -c_minus.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shaped.covariance import FEW, Point, factor, gram, make_batch_innermost, vech
from shaped.engine import draw_start
from shaped.layers.attention import ShapedAttention
from shaped.layers.base import Chain, Layer, ResidualLayer, Sizes
from shaped.layers.feedforward import FeedForward, ShapedFeedForward, ShapedPerceptron
from shaped.randomness import Stream
from shaped.testing.stats import assert_rejected, on_cpu, random_covariance, seed

CPU = torch.device("cpu")
BLOCK = 8192  # samples that are drawn together and stay in the processor's cache
BLOCKS = 64  # at least so many, for the error of their mean
PILOT = 128  # samples that show how many are needed
FAR = 0.4  # share of the drift by which networks of the first width may be off
LEFT = 0.01  # share of the drift that the extrapolation may leave: it does for no slopes that pass the other two bounds
Z_SEEN = 9.0  # standard errors in an error of 5 %: the 5 that are allowed, and 4

Change = Callable[[Tensor, Sizes, Stream], Tensor]


@on_cpu()
def check_drift_of_branch(
    layer: ResidualLayer,
    m: int = 3,
    n: int = 64,
    samples: int = 800_000,
    reject: bool = True,
    control: ResidualLayer | None = None,
    n_k: int | None = None,
) -> None:
    """n·E[V' - V] → b for a residual layer. An error of 5 % is rejected if `reject`.

    At a finite width the left-hand side is b + c₁/sqrt(n) + c₂/n + …; for a shaped ReLU c₁ = -(c_plus + c_minus)·b. The widths n, 16n and
    256n remove c₁ and c₂. Where networks of width n are far from the limit, the first is 4n or 16n.

    Given F, the mean over the values' weights is exact, E[V'] = lam² V + gamma² F Fᵀ, so only F is drawn: as often as is needed, at most
    `samples` times.

    `control` is a layer with drift 0 that draws the same normals. Its samples are subtracted, which removes the noise of a layer whose F Fᵀ
    is a mean over features; this noise grows with n. Layers of this package have one by default (`find_control`). `n_k` is the width of
    the keys at every n; by default n over the heads. Rotary positions with a base draw every feature of the keys, which is slow at these
    widths: give n = 16, few samples and `reject=False`, or frequencies in place of the base.
    """
    needs_none = isinstance(layer, ShapedAttention) and not layer.project  # there F Fᵀ is V without logits
    subtracted = find_control(layer) if control is None and not needs_none else control
    changes = [partial(_average_step, each) for each in (layer, subtracted) if isinstance(each, ResidualLayer)]
    _check_drift(layer, subtracted, changes, m, Sizes(n, n_k), samples, reject)


@on_cpu()
def check_drift_of_steps(
    layer: Layer, m: int = 3, n: int = 64, samples: int = 800_000, reject: bool = True, control: Layer | None = None
) -> None:
    """The same for any layer, from whole steps. Without a control their noise grows with n, and hides every drift."""
    control = find_control(layer) if control is None else control
    changes = [partial(_take_step, each) for each in (layer, control) if each is not None]
    _check_drift(layer, control, changes, m, Sizes(n), samples, reject)


def find_control(layer: Layer) -> Layer | None:
    """The layer without what makes its drift: slopes 1, logits 0. None for layers of other packages."""
    if isinstance(layer, FeedForward):
        return ShapedFeedForward(layer.gamma, 0.0, 0.0, layer.lam)
    if isinstance(layer, ShapedPerceptron):
        return ShapedPerceptron(0.0, 0.0)
    if isinstance(layer, ShapedAttention):
        own: dict[str, Any] = {entry.name: getattr(layer, entry.name) for entry in fields(ShapedAttention)}
        own["tau0"] = 1e9
        return ShapedAttention(**own)
    if isinstance(layer, Chain):
        controls = [control for control in map(find_control, layer.layers) if control is not None]
        return Chain(*controls) if len(controls) == len(layer.layers) else None
    return None


def _average_step(layer: ResidualLayer, V: Tensor, sizes: Sizes, stream: Stream) -> Tensor:
    """E[V' - V] over the values' weights."""
    inside = torch.stack([F @ F.mT for F in layer.branch(factor(V), sizes, stream)]).mean(0)
    return (layer.shortcut**2 - 1) * V + layer.gamma**2 * inside


def _take_step(layer: Layer, V: Tensor, sizes: Sizes, stream: Stream) -> Tensor:
    """V' - V."""
    if layer.needs_tokens:
        return gram(layer.advance_tokens(draw_start(V, sizes.n, stream), sizes, stream)) - V
    return layer.advance_gram(Point(matrix=V), sizes, stream).V - V


class PairedStream(Stream):
    """The same normals at every width. Gamma numbers, which take more or fewer draws for another width, have a source of their own."""

    def _gamma(self, shapes: np.ndarray, count: int) -> Tensor:
        return self.fork()._gamma(shapes, count)


class MirroredStream(PairedStream):
    """The same draws, with the sign of the logits and of hidden features turned."""

    sign = -1.0

    def fill(self, buffer: Tensor) -> Tensor:
        return super().fill(buffer).mul_(self.sign)

    def bartlett(self, like: Tensor, size: int, degrees: int) -> Tensor:
        """As it is: turned together with what it multiplies, it would leave the logits' sign as it was."""
        self.sign = 1.0
        T = super().bartlett(like, size, degrees)
        self.sign = -1.0
        return T

    def rows(self, like: Tensor, size: int, degrees: int) -> Tensor:
        """As it is, for the same reason."""
        return -super().rows(like, size, degrees)


def find_block(samples: int) -> int:
    """Samples in a block, where so many are drawn."""
    return min(BLOCK, math.ceil(samples / BLOCKS))


def draw_drifts(changes: Sequence[Change], V: Tensor, sizes: Sizes, blocks: range, block: int, literal: int) -> list[Tensor]:
    """Samples with mean n·E[V' - V], as means of blocks of this size, [p]. The second change, of the control, is subtracted.

    Blocks have streams of their own and are independent. In a block all widths, layer and control share their draws, which removes noise
    from differences. Logits and hidden features come in pairs of both signs, which removes everything that is odd in them.
    """
    many, means = V.expand(block, *V.shape), list[Tensor]()
    many = make_batch_innermost(many) if len(V) <= FEW else many.contiguous()
    for number in blocks:
        one, mirrored = (
            [change(many, sizes, source(literal, number, dtype=V.dtype, device=CPU)) for change in changes]
            for source in (PairedStream, MirroredStream)
        )
        pairs = [(x + y) / 2 for x, y in zip(one, mirrored, strict=True)]
        means.append(sizes.n * vech((pairs[0] - pairs[1] if len(pairs) > 1 else pairs[0]).mean(0)))
    return means


def _check_drift(layer: Layer, control: Layer | None, changes: Sequence[Change], m: int, sizes: Sizes, samples: int, reject: bool) -> None:
    V = random_covariance(m, 56)
    b = vech(layer.drift(V))
    scale = b.abs().max() if b.any() else V.max()  # what errors are measured in
    if control is not None:
        assert (vech(control.drift(V)).abs() < 1e-9 * scale).all(), f"control must have drift 0, got {control!r}"

    literal = seed(55)
    kept = defaultdict[tuple[int, int], list[Tensor]](list)

    def draw(n: int, samples: int, block: int) -> Tensor:
        """Means of blocks of this size, [block, p]. Only those that are not there yet are drawn."""
        means = kept[n, block]
        means += draw_drifts(changes, V, Sizes(n, sizes.n_k), range(len(means), math.ceil(samples / block)), block, literal)
        return torch.stack(means)

    def is_near(means: Tensor, expected: Tensor | float, share: float) -> bool:
        return bool(((means.mean(0) - expected).abs() < 5 * _find_error(means) + share * scale).all())

    def extrapolate(first: int, samples: int, block: int) -> tuple[Tensor, Tensor]:
        """What is left without the terms in n^(-1/2) and 1/n, and the share of the latter."""
        widths = (first, 16 * first, 256 * first)
        drawn = torch.stack([draw(n, samples, block) for n in widths])
        found, rough = (torch.tensordot(find_weights(widths[skip:]), drawn[skip:], 1) for skip in (0, 1))
        return found, found - rough

    drawn = min(PILOT, samples)
    block = find_block(drawn)
    for first in (sizes.n, 4 * sizes.n, 16 * sizes.n):
        # Far from the limit the first terms of the series say little about it.
        if is_near(draw(first, drawn, block), b, FAR) and is_near(extrapolate(first, drawn, block)[1], 0.0, LEFT):
            break
    else:
        got = draw(16 * sizes.n, drawn, block).mean(0)
        raise AssertionError(f"n·E[V' - V] must approach the drift {b}, or n be larger, got {got} at n = {16 * sizes.n}")
    wrong = 0.05 * (b if b.any() else scale.expand_as(b))
    seen = wrong.abs() - LEFT * scale  # what is left of an error of 5 %, in some entries nothing
    while True:
        found, share = extrapolate(first, drawn, block)
        needed = drawn * (Z_SEEN * _find_error(found) / seen)[seen > 0].min().item() ** 2
        if needed <= drawn or drawn == samples:
            break
        assert not reject or needed < 4 * samples, f"samples must be about {needed:.0e} to see 5 %, or control be given, got {samples}"
        pilot, drawn = drawn <= PILOT, min(samples, math.ceil(1.3 * needed))
        block = find_block(drawn) if pilot else block
    assert is_near(share, 0.0, LEFT), f"n must be larger: n·E[V' - V] is not near its limit, got {first}"

    def check(expected: Tensor) -> None:
        assert is_near(found, expected, LEFT), f"drift must be {found.mean(0)}, as networks have it, got {b}"

    check(b)
    if reject:
        assert_rejected(lambda: check(b - wrong))
        assert_rejected(lambda: check(b + wrong))


def _find_error(means: Tensor) -> Tensor:
    return means.std(0) / len(means) ** 0.5


def find_weights(widths: Sequence[int]) -> Tensor:
    """Weights that give the limit of a series in n^(-1/2) from its values at these widths, exact if it has no more terms."""
    root = torch.tensor(widths, dtype=torch.float64).rsqrt()
    return torch.linalg.solve(torch.stack([root**k for k in range(len(root))]), torch.eye(len(root), dtype=torch.float64)[0])
