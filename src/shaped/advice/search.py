"""advise: finds the largest safe gamma. A coarse search by few samples comes first, then the proof by many fresh ones."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import torch

from shaped.advice.measurement import Ledger, Place
from shaped.advice.question import COMPARED, Question
from shaped.advice.result import Advice
from shaped.advice.rows import Boundary, Row
from shaped.checks import in_range, positive, whole_number
from shaped.intervals import exact_interval

GRID = tuple(2.0 ** (-step / 4 - 0.5) for step in reversed(range(17)))
"""From 1/sqrt(32) to sqrt(1/2), where shortcut and branch have the same weight; neighbours differ by a factor of 2^(1/4)."""
COARSE = 4
"""The search goes down from the largest gamma in steps of so many places, a factor of 2, and then bisects."""
FEW = 8
"""Samples of a place in the search, and networks of a block to compare with."""
FEW_PATHS = 32
"""The same for the limit, whose paths cost less."""
MOST_TAU0 = 16


def advise(
    n: int,
    d: int,
    m: int,
    heads: int = 8,
    mask: Any = "causal",
    *,
    tau0: float | Sequence[float] | None = None,
    gammas: Sequence[float] | None = None,
    qk_norm: bool = False,
    rope: Any = None,
    hidden: int | None = None,
    c_minus: float = -1.0,
    rho: float = 0.2,
    correlation: float = 0.9,
    growth: float = 10.0,
    share: float = 0.01,
    samples: int | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
    executor: Executor | None = None,
    progress: bool | None = None,
    tell: Callable[[Row], None] | None = None,
) -> Advice:
    r"""The largest gamma of a shaped Transformer at which few networks align or explode at initialisation.

    A network aligns if the mean absolute correlation of pairs of tokens after the last layer is above `correlation`. It explodes if its
    stream is more than `growth` times as long there as at the start, or left the range of floats. Both are counted in networks of this
    size, exact in law, in float32. The blocks are those of `ShapedDecoder`: attention with output projection, then a feed-forward layer,
    and both branches have the weight gamma.

    For each tau0, a search by few networks finds where they begin to fail. It assumes that more fail at a larger gamma. The largest gamma
    that it finds is then to be proved by fresh networks, which the search did not see: the exact interval of the failing share is to lie
    below `share`. Their number is fixed before; they end early at the failure that denies it. If so, the next smaller candidate is
    tried. Then fresh networks show whether the next gamma is unsafe. Each end of an interval holds with 95 % confidence; not all of them
    do so together.

    Args:
        n, d, m: width, depth and number of tokens.
        heads, mask, qk_norm, rope: as in `ShapedAttention`.
        tau0: temperatures to search; by default $n^{-1/2}$ (that of attention without shaping), $n^{-1/4}$ and 1 (the paper's).
        gammas: the grid, rising; by default 17 values from 0.044 to 0.707, a factor of $2^{1/4}$ apart.
        hidden: width inside the feed-forward layers; 4n by default. The limit has n.
        c_minus: negative slope of the shaped ReLU.
        rho: correlation of the tokens at the start. Their length is 1.
        correlation, growth: the bounds beyond which a network fails.
        share: the share of networks that may fail.
        samples: networks of a proof; by default as many as prove the share if none fails, 299 for 1 %. With more, some may fail. A quarter
            of them show whether a gamma is unsafe.
        seed: the same seed gives the same numbers, whatever the executor.
        device, executor, progress: as in `solve`.
        tell: is called with each row as it is found.
    """
    asked = Question(n, d, m, heads, mask, qk_norm, rope, hidden, c_minus, rho, correlation, growth, share)
    temperatures = check_temperatures(tau0, asked.n)
    grid = check_gammas(gammas)
    least = count_for_proof(asked.share)
    trial = Trial(asked.share, least if samples is None else whole_number("samples", samples, least))
    began = time.perf_counter()
    seed = whole_number("seed", seed, least=0, most=math.inf)
    ledger = Ledger(asked, seed, device, executor, progress, tell)

    def bound(law: str, tau0: float, count: int) -> int:
        """In the search a gamma is good if no larger share fails than may."""
        return find_boundary(lambda gamma: ledger.search(Place(law, gamma, tau0), count).share <= asked.share, grid)

    found = {one: {"limit": bound("limit", one, FEW_PATHS)} for one in temperatures}
    for one in temperatures:
        found[one]["network"] = bound("network", one, FEW)
    best = prove(partial(trial.prove, ledger), partial(trial.refute, ledger), found, grid)
    enclose(partial(trial.refute, ledger, best), found[best]["network"] + 1, grid)
    for one in temperatures:
        if found[one]["network"] >= 0:
            place = Place("network", grid[found[one]["network"]], one)
            ledger.search(place, FEW)
            ledger.backpropagate(place)
    compared = compare_blocks(ledger, grid[max(0, found[best]["network"])], best)
    boundaries = [make_boundary(ledger, law, one, found[one][law], grid) for one in temperatures for law in ("network", "limit")]
    answer = next(one for one in boundaries if one.law == "network" and one.tau0 == best)
    counts = {"samples": trial.samples, "proofs": trial.proofs, "verdicts": len(trial.verdicts)}
    info = {"seed": seed, **counts, "seconds": round(time.perf_counter() - began, 1)}
    return Advice(asked, boundaries, ledger.rows(), compared, answer, info)


def check_temperatures(tau0: Any, n: int) -> tuple[float, ...]:
    if tau0 is None:
        return n**-0.5, n**-0.25, 1.0
    alone = isinstance(tau0, str) or not isinstance(tau0, Iterable) or getattr(tau0, "ndim", 1) == 0  # an array may be one number
    given = (tau0,) if alone else tuple(tau0)
    checked = tuple(sorted({positive("tau0", one, 1e6) for one in given}))
    if not 1 <= len(checked) <= MOST_TAU0:
        raise ValueError(f"tau0 must be 1 to {MOST_TAU0} temperatures, got {len(checked)}")
    return checked


def check_gammas(gammas: Sequence[float] | None) -> tuple[float, ...]:
    if gammas is None:
        return GRID
    checked = tuple(in_range("gammas", gamma, 0.0, 1.0) for gamma in gammas)
    if len(checked) < 2 or any(after <= before for before, after in zip((0.0, *checked), checked, strict=False)):
        raise ValueError(f"gammas must be at least two rising numbers above 0, got {list(gammas)}")
    return checked


def count_for_proof(share: float) -> int:
    """How many networks prove that fewer than this share fail, if none of them does."""
    count = math.ceil(math.log(0.05) / math.log1p(-share))
    while exact_interval(0, count)[1] >= share:
        count += 1
    return count


def find_boundary(is_safe: Callable[[float], bool], grid: Sequence[float]) -> int:
    """The last place of the grid that is safe, by steps down from the largest gamma and by bisection; -1 if none is."""
    unsafe, safe = len(grid), len(grid) - 1
    while safe >= 0 and not is_safe(grid[safe]):
        unsafe, safe = safe, safe - COARSE if safe >= COARSE or safe == 0 else 0
    safe = max(safe, -1)
    while unsafe - safe > 1:
        middle = (safe + unsafe) // 2
        safe, unsafe = (middle, unsafe) if is_safe(grid[middle]) else (safe, middle)
    return safe


class Trial:
    """Decides places by fresh networks, which the search did not see. So a verdict does not depend on how the place was found."""

    def __init__(self, share: float, samples: int):
        """`samples`: networks of a proof. A refutation has a quarter of them: it only has to see failures."""
        self.share, self.samples, self.fewer = share, samples, max(FEW, samples // 4)
        self.enough = bisect_left(range(samples), True, key=lambda failed: exact_interval(failed, samples)[1] >= share)
        self.many = bisect_left(range(self.fewer), True, key=lambda failed: exact_interval(failed, self.fewer)[0] > share)
        self.verdicts: set[tuple[Place, str]] = set()
        """What the answer rests on: places, each with the stage whose networks gave its verdict. Each is wrong with 5 % at most."""

    @property
    def proofs(self) -> int:
        return sum(stage == "proof" for _, stage in self.verdicts)

    def prove(self, ledger: Ledger, tau0: float, gamma: float) -> str:
        """Is this place safe? The networks end at the failure that denies it."""
        place = Place("network", gamma, tau0)
        self.verdicts.add((place, "proof"))
        return ledger.draw(place, "proof", self.samples, self.enough).verdict(self.share)

    def refute(self, ledger: Ledger, tau0: float, gamma: float) -> str:
        """Is this place unsafe? The networks end at the failure that proves it. A place that is known to be unsafe is left as it is."""
        place = Place("network", gamma, tau0)
        record = ledger.records.get(place)
        if record is not None and (record.stage == "refutation" or ledger.row(place).verdict(self.share) == "unsafe"):
            self.verdicts.add((place, record.stage))
            return ledger.row(place).verdict(self.share)
        self.verdicts.add((place, "refutation"))
        return ledger.draw(place, "refutation", self.fewer, self.many).verdict(self.share)


Decide = Callable[[float, float], str]
"""The verdict at a tau0 and a gamma."""


def prove(decide: Decide, refute: Decide, found: dict[float, dict[str, int]], grid: Sequence[float]) -> float:
    """The tau0 with the largest gamma that is proved to be safe. `found` has the candidates, and then the last safe place of this tau0.

    The best candidate is decided first. If it is not safe, its tau0 goes on with the next smaller gamma.
    """
    while True:
        # At the same gamma a smaller tau0 leaves attention stronger.
        best = max(found, key=lambda one: (found[one]["network"], -one))
        place = found[best]["network"]
        if place < 0:
            return best
        if decide(best, grid[place]) != "safe":
            found[best]["network"] -= 1
            continue
        while place + 1 < len(grid) and refute(best, grid[place + 1]) == "safe":
            place += 1
        found[best]["network"] = place
        return best


def enclose(refute: Callable[[float], str], place: int, grid: Sequence[float]) -> None:
    """Goes up from this place, a few steps, until a gamma is unsafe."""
    for gamma in grid[place : place + COARSE]:
        if refute(gamma) == "unsafe":
            return


def make_boundary(ledger: Ledger, law: str, tau0: float, below: int, grid: Sequence[float]) -> Boundary:
    rows = [ledger.row(at) for at in (Place(law, gamma, tau0) for gamma in grid) if at in ledger.records]
    reached = -math.inf if below < 0 else grid[below]
    above = [row for row in rows if row.gamma > reached]
    unsafe = next((row for row in above if row.verdict(ledger.question.share) == "unsafe"), None)
    return Boundary(law, tau0, next((row for row in rows if row.gamma == reached), None), above[0] if above else None, unsafe)


def compare_blocks(ledger: Ledger, gamma: float, tau0: float) -> list[Row]:
    """What blocks without shaping do at the gamma of the answer."""
    places = [Place(name, gamma, tau0) for name in COMPARED]
    for place in places:
        ledger.search(place, FEW)
    return [ledger.backpropagate(place) for place in places]
