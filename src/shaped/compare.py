"""compare: distances between two laws, with standard errors and with the distances expected between two samples of one law."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shaped.checks import quote, whole_number
from shaped.covariance import correlation
from shaped.intervals import format_share
from shaped.trajectory import Trajectory

Statistic = Callable[[Float[Tensor, "sample m m"]], Float[Tensor, "sample *number"]]
Sample = Float[np.ndarray, "sample number"]
HEAVY = 0.4
"""From this tail index on the error of a Wasserstein distance cannot be told; from 1/2 on it is infinite. Of two samples of 300 values
that are exp of normals with deviation 2, the bootstrap finds a half of it."""
NOTICEABLE = 0.01
"""A share of unresolved values that is printed: about the distance that a thousand paths can show."""


def find_resolution(dtype: torch.dtype, m: int) -> float:
    """How near to ±1 a correlation can be told from ±1 after many steps in this dtype, and how near to 0 an eigenvalue of V, as a share of
    the largest.

    Rounding hardly adds up over the steps: `factor` raises pivots to 4·m·eps at each, and a path at that floor leaves it upwards. So laws
    are wrong up to a few times the floor. Of perceptrons of 300 to 1,200 layers, correlations in float32 and in float64 have the
    Kolmogorov-Smirnov distance 0.06 to 0.09 where they are cut at the floor, and that of one law at this, 13 times the floor in float32.
    """
    return m * torch.finfo(dtype).eps ** 0.75


def find_statistic(name: str, pair: tuple[int, int] | None, m: int, coarser: torch.dtype) -> Statistic:
    """The statistic of this name. "rho" and "V" are those of one pair of tokens, or of all pairs for None.

    What the coarser dtype of both trajectories cannot resolve is set equal: a correlation so near to ±1, an eigenvalue so near to 0.
    """
    rows, columns = torch.triu_indices(m, m, 1, device="cpu") if pair is None else ([pair[0]], [pair[1]])
    first = range(m) if pair is None else [pair[0]]
    resolution, tiny = find_resolution(coarser, m), torch.finfo(coarser).tiny

    def rho(V: Float[Tensor, "sample m m"]) -> Float[Tensor, "sample pair"]:
        found = correlation(V)[:, rows, columns]
        return torch.where(1.0 - found.abs() < resolution, found.sign(), found)

    def logdet(V: Float[Tensor, "sample m m"]) -> Float[Tensor, " sample"]:
        values = torch.linalg.eigvalsh(V)
        return torch.maximum(values, (resolution * values[:, -1:]).clamp(min=tiny)).log().sum(-1)

    known: dict[str, Statistic] = {
        "rho": rho,
        "V": lambda V: V[:, rows, columns],
        "variance": lambda V: V.diagonal(dim1=-2, dim2=-1)[:, list(first)],
        "logdet": logdet,
        "eigmax": lambda V: torch.linalg.eigvalsh(V)[:, -1],
    }
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"statistics must be functions of V or among {', '.join(known)}, got {quote(name)}")
    return known[name]


def select_statistics(given: Any, pair: tuple[int, int] | None, m: int, coarser: torch.dtype) -> dict[str, Statistic]:
    """The statistics as functions by name. `given` is a name, names, functions by name, or None for the default."""
    if given is None:
        given = ("rho", "V", "logdet", "eigmax") if m > 1 else ("variance",)
    if isinstance(given, str):
        given = (given,)
    if not isinstance(given, Mapping | Collection) or isinstance(given, bytes) or not given:
        raise ValueError(f"statistics must be names, or functions of V by name, at least one, got {given!r:.60}")
    if isinstance(given, Mapping):
        return dict(given)
    if m == 1 and any(name in ("rho", "V") for name in given):
        raise ValueError(f"statistics must not be about pairs where there is one token, got {tuple(given)}")
    return {str(name): find_statistic(name, pair, m, coarser) for name in given}


@dataclass(frozen=True)
class Distance:
    """A distance between two samples."""

    value: float
    """Of the two samples. By chance it is larger than that of the laws: by `floor` where they are one, by little where it is far above."""
    error: float
    """Standard deviation of `value`. nan for a Wasserstein distance of values with so heavy a tail that it cannot be told."""
    band: float
    """The distance between two samples of one law, of these sizes, is above it in 5 % of cases at most (by permutation)."""
    floor: float
    """Root mean square of the distance between two samples of one law (by permutation)."""
    p: float
    """Share of the permutations whose distance is at least `value`: a p-value for "one law"."""

    @property
    def within_band(self) -> bool:
        return self.value <= self.band

    def __str__(self) -> str:
        error = "?, heavy tail" if math.isnan(self.error) else f"{self.error:.2g}"
        return f"{self.value:.4g} ± {error} (one law: below {self.band:.4g}; p = {self.p:.2g})"


@dataclass(frozen=True)
class Comparison:
    """Distances between two trajectories at one time, by statistic, over the paths that have not stopped before it."""

    ks: dict[str, Distance]
    wasserstein: dict[str, Distance]
    stopped: tuple[float, float]
    samples: tuple[int, int]
    unresolved: dict[str, float] = field(default_factory=dict)
    """The share of values that rounding hides: of "rho" those set to ±1, of "logdet" those with eigenvalues that were raised."""
    one_seed: bool = False
    """Do both come from the same random numbers? Then their paths are alike, while errors, bands and p are those of independent paths."""

    def __str__(self) -> str:
        stopped = " and ".join(format_share(share, count) for share, count in zip(self.stopped, self.samples, strict=True))
        lines = [f"{self.samples[0]} and {self.samples[1]} paths; stopped: {stopped}"]
        if self.one_seed:
            lines.append("both are of one seed: their paths are alike, and differences go unnoticed; give one of them another seed")
        for name in self.ks:
            lines += [f"{name:>10}  Kolmogorov-Smirnov  {self.ks[name]}", f"{'':>10}  Wasserstein         {self.wasserstein[name]}"]
            if self.unresolved.get(name, 0.0) >= NOTICEABLE:
                lines.append(f"{'':>10}  rounding hides the collapse in {self.unresolved[name]:.0%} of the values")
        return "\n".join(lines)


def compare(
    one: Trajectory,
    other: Trajectory,
    *,
    statistics: Sequence[str] | dict[str, Statistic] | None = None,
    pair: tuple[int, int] | None = (0, 1),
    at: int = -1,
    resamples: int = 400,
    seed: int = 0,
) -> Comparison:
    """Kolmogorov-Smirnov and Wasserstein distances between two trajectories at one of their recorded times.

    Paths that began at different V0, each with the same share in both trajectories, are permuted among those of the same V0. For that both
    must have recorded time 0, which `record="last"` does not. Otherwise the paths of a trajectory count as draws of one law: for a fixed
    list of different V0 bands and errors are then too large, and differences go unnoticed.

    Two simulations of one kind need different seeds: of one seed they have the same random numbers (`Comparison.one_seed`). `solve` and
    `propagate` draw different numbers from one seed.

    Args:
        statistics: names ("rho", "V", "variance", "logdet", "eigmax"), or functions by name, from V, [sample, m, m], to one number or
            [sample, number]. By default all but the variance. "rho" so near to ±1 that rounding hides the rest is ±1, and "logdet"
            raises eigenvalues so near to 0: nearer than m·eps^¾ (of the largest eigenvalue), with the eps of the coarser dtype.
        pair: the pair of tokens for "rho" and "V"; "variance" takes the first of them. A token twice is its variance for "V", and refused
            for "rho". None: all pairs together, a larger sample where the tokens are exchangeable. Numbers of one path depend on each
            other, so errors and bands resample whole paths.
        at: index of the recorded time; the last by default.
        resamples: number of permutations, and of bootstrap samples.
        seed: seed of the resampling.
    """
    for name, path in (("one", one), ("other", other)):
        if not isinstance(path, Trajectory):
            raise ValueError(f"{name} must be a Trajectory, as solve and propagate return it, got {type(path).__name__}")
    m = one.V.shape[-1]
    if other.V.shape[-1] != m:
        raise ValueError(f"other must have {m} tokens as the first trajectory has, got {other.V.shape[-1]}")
    if pair is not None and not (isinstance(pair, Sequence) and len(pair) == 2 and all(is_index(token, m) for token in pair)) and m > 1:
        raise ValueError(f"pair must name two of the {m} tokens, got {pair!r}")
    resamples, seed = whole_number("resamples", resamples, least=20), whole_number("seed", seed, least=0, most=math.inf)
    for path in (one, other):
        if not is_index(at, len(path.t)):
            count = len(path.t)
            raise ValueError(f"at must be the place of one of the {count} recorded times, from {-count} to {count - 1}, got {at!r}")
    times = [path.t[at].item() for path in (one, other)]
    if abs(times[0] - times[1]) > 0.05 * max(times):
        raise ValueError(f"at must be the same time in both trajectories, got t = {times[0]:.4g} and {times[1]:.4g}")
    coarser = max((path.V.dtype for path in (one, other)), key=lambda dtype: torch.finfo(dtype).eps)
    selected = select_statistics(statistics, pair if m > 1 else None, m, coarser)
    if pair is not None and m > 1 and pair[0] % m == pair[1] % m and "rho" in selected and not isinstance(statistics, Mapping):
        raise ValueError(f"pair must name two different tokens for 'rho', a token's correlation with itself is 1, got {pair!r}")
    # Paths that have not stopped by that time. Leaving out paths that stop later would look into the future.
    running = [path.V[at][(path.stopped > time).to(path.V.device)] for path, time in zip((one, other), times, strict=True)]
    if min(map(len, running)) < 2:
        raise ValueError(f"each trajectory must have at least 2 paths that did not stop, got {len(running[0])} and {len(running[1])}")
    starts, groups = number_starts(one, other, coarser), None
    if starts is not None:
        kept = [path.stopped.cpu().numpy() > time for path, time in zip((one, other), times, strict=True)]
        groups = np.concatenate([numbers[keep] for numbers, keep in zip(starts, kept, strict=True)])
    rng = np.random.default_rng(seed)
    # Values that differ only by rounding are set equal, such as those of a limit without noise.
    rounding = torch.finfo(coarser).eps ** 0.75
    ks, wasserstein, unresolved = {}, {}, {}
    for name, statistic in selected.items():
        x, y = (_evaluate(name, statistic, V) for V in running)
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            raise ValueError(f"statistics must be finite, got {name!r} with values that are not")
        if not isinstance(statistics, Mapping):
            hidden = [find_unresolved(name, values, V, coarser) for values, V in zip((x, y), running, strict=True)]
            unresolved[name] = float(np.concatenate(hidden).mean())
        pooled = np.concatenate([x, y])
        if np.ptp(pooled) <= rounding * np.abs(pooled).max():
            x, y = np.full_like(x, pooled.flat[0]), np.full_like(y, pooled.flat[0])
        ks[name], wasserstein[name] = measure_distances(x, y, resamples, rng, groups)
    stopped = [(path.V.shape[1] - len(rest)) / path.V.shape[1] for rest, path in zip(running, (one, other), strict=True)]
    return Comparison(ks, wasserstein, (stopped[0], stopped[1]), (one.V.shape[1], other.V.shape[1]), unresolved, has_one_seed(one, other))


def has_one_seed(one: Trajectory, other: Trajectory) -> bool:
    """Do both come from the same random numbers (`Stream`)?"""
    drawn = [[path.info.get(name) for name in ("seed", "method", "path")] + [path.V.dtype, path.V.device.type] for path in (one, other)]
    return drawn[0] == drawn[1] and drawn[0][0] is not None


def find_unresolved(name: str, values: Sample, V: Float[Tensor, "sample m m"], coarser: torch.dtype) -> Bool[np.ndarray, "sample number"]:
    """Which values of a statistic of ours were set equal because the coarser dtype cannot resolve them."""
    if name == "logdet":
        eigenvalues = torch.linalg.eigvalsh(V)
        return (eigenvalues[:, :1] < find_resolution(coarser, V.shape[-1]) * eigenvalues[:, -1:]).cpu().numpy()
    return np.abs(values) == 1.0 if name == "rho" else np.zeros_like(values, dtype=bool)


def number_starts(one: Trajectory, other: Trajectory, coarser: torch.dtype) -> list[Int[np.ndarray, " sample"]] | None:
    """The number of the V0 at which each path of each trajectory began. None unless both recorded it and began at different V0, each with
    the same share in both."""
    if one.t[0] != 0 or other.t[0] != 0:
        return None
    V0 = [path.V[0].to(coarser).flatten(1).cpu() for path in (one, other)]
    first = V0[0][0]
    if all(torch.equal(V, first.expand_as(V)) for V in V0):
        return None
    numbers = torch.unique(torch.cat(V0), dim=0, return_inverse=True)[1].numpy()
    found = np.split(numbers, [len(V0[0])])
    counts = [np.bincount(part, minlength=numbers.max() + 1) for part in found]
    return found if (counts[0] * len(V0[1]) == counts[1] * len(V0[0])).all() else None


def permute_within(groups: Int[np.ndarray, " row"], values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The values, permuted among the rows of each group."""
    permuted = np.empty_like(values)
    permuted[np.lexsort((rng.random(len(values)), groups))] = values[np.argsort(groups, kind="stable")]
    return permuted


def is_index(value: object, m: int) -> bool:
    """Is it an index into m items, from either end? A boolean is not."""
    try:
        return not isinstance(value, bool) and -m <= operator.index(value) < m  # pyright: ignore[reportArgumentType]
    except TypeError:
        return False


def _evaluate(name: str, statistic: Statistic, V: Tensor) -> Sample:
    """The values of a statistic, which may be the user's own function, checked: one row a path."""
    if not callable(statistic):
        raise ValueError(f"statistics must be functions of V by name, got {statistic!r} as {name!r}")
    found = statistic(V)
    if not isinstance(found, Tensor) or found.ndim == 0 or len(found) != len(V) or found.numel() == 0:
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"statistics must give one number or a row of them for each of the {len(V)} paths, got {shape} from {name!r}")
    if found.is_complex():
        raise ValueError(f"statistics must give real numbers, got {found.dtype} from {name!r}")
    return found.double().reshape(len(V), -1).cpu().numpy()


def measure_distances(
    x: Sample, y: Sample, resamples: int, rng: np.random.Generator, groups: Int[np.ndarray, " row"] | None = None
) -> tuple[Distance, Distance]:
    r"""Kolmogorov-Smirnov and Wasserstein-1 distances of two samples. Rows are independent; numbers in one row need not be.

    The bootstrap adds the noise of resampled rows to the measured difference D of the distribution functions. But D has noise of its own,
    and with both the error is too large where the laws are one: the distance is not differentiable there (Fang and Santos, Rev. Econ. Stud.
    86, 2019). So the noise is added to $\lambda D$, $\lambda^2 = 1 - \text{floor}^2 / (2\,\text{value}^2)$, at least 0. Without the 2, D
    would have the mean square of the laws' difference, and errors of laws a little apart would be too small.

    `groups`: the number of the group of each row of x and then of y. "One law" is then one law in each group. If a group has one row of a
    sample, the noise is that of a permutation: up to twice too large where laws are far apart.
    """
    pooled = np.concatenate([x, y])
    order = np.argsort(pooled, axis=None, kind="stable")
    gaps = np.diff(pooled.ravel()[order])
    ends = np.append(gaps > 0, True)  # distribution functions are compared where equal values end
    row = order // pooled.shape[1]
    sizes = len(x), len(y)
    from_x = np.arange(sum(sizes)) < sizes[0]

    def weigh(in_x: np.ndarray) -> np.ndarray:
        """What each row adds to the difference of the distribution functions, for samples of these sizes."""
        return np.where(in_x, 1 / sizes[0], -1 / sizes[1]) / pooled.shape[1]

    def measure(for_ks: np.ndarray, for_wasserstein: np.ndarray) -> tuple[float, float]:
        """The distances, from the difference of the distribution functions."""
        largest = np.abs(for_ks).max() if ends.all() else np.abs(for_ks[ends]).max()
        # Not `@`: BLAS would start threads for it, which wait for each other on a busy machine.
        # A largest difference is a multiple of 1/samples: round off the error of the sum.
        return round(float(largest), 12), float(np.einsum("i,i", np.abs(for_wasserstein[:-1]), gaps))

    gap = np.cumsum(weigh(from_x)[row])
    measured = np.array(measure(gap, gap))

    def permute() -> np.ndarray:
        return weigh(rng.permutation(from_x) if groups is None else permute_within(groups, from_x, rng))

    permuted, bootstrap = np.empty((resamples, 2)), np.empty((resamples, 2))
    for i in range(resamples):
        noise = np.cumsum(permute()[row])
        permuted[i] = measure(noise, noise)
    floor = np.sqrt(np.mean(permuted**2, 0))
    relative = floor / np.maximum(np.maximum(measured, floor / 2), 1e-300)  # beyond 2 nothing is left of D
    kept = np.sqrt(np.maximum(0.0, 1.0 - relative**2 / 2))
    for_ks, for_wasserstein = kept[:, None] * gap
    cells = from_x.astype(int) if groups is None else 2 * groups + from_x
    resample, weights = make_resampler(cells, rng), weigh(from_x)
    for i in range(resamples):
        noise = np.cumsum((permute() if resample is None else weights * resample())[row])
        bootstrap[i] = measure(for_ks + noise, for_wasserstein + noise)
    index, lacking = estimate_tail(find_spread(pooled, cells))
    errors = bootstrap.std(0, ddof=1).tolist()
    errors[1] = lacking * errors[1] if index < HEAVY else math.nan
    # One in 20 of all orders of the pooled rows, with the measured one among them, may lie above: `within_band` is then p > 0.05.
    bands = np.sort(permuted, 0)[math.ceil(0.95 * (resamples + 1)) - 1]
    p = (1 + np.sum(permuted >= measured, 0)) / (1 + resamples)
    columns = (measured.tolist(), errors, bands.tolist(), floor.tolist(), p.tolist())
    ks, wasserstein = (Distance(*found) for found in zip(*columns, strict=True))
    return ks, wasserstein


def make_resampler(cells: Int[np.ndarray, " row"], rng: np.random.Generator) -> Callable[[], Float[np.ndarray, " row"]] | None:
    """The bootstrap's noise: draws the rows of each cell with replacement. None if a cell has one row, which has none.

    Each row gets how much more often than once it was drawn. Of k rows that has the share (k - 1)/k of the variance: it is made up for.
    """
    order = np.argsort(cells, kind="stable")
    _, place, counts = np.unique(cells, return_inverse=True, return_counts=True)
    if counts.min() < 2:
        return None
    first, size = (np.cumsum(counts) - counts)[place[order]], counts[place[order]]
    missing = np.sqrt(counts / np.maximum(counts - 1, 1))[place]

    def resample() -> Float[np.ndarray, " row"]:
        drawn = order[first + (rng.random(len(order)) * size).astype(int)]
        return missing * (np.bincount(drawn, minlength=len(order)) - 1)

    return resample


def find_spread(pooled: Sample, cells: Int[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
    """How far the values of each row lie from the median of its cell, in the mean over the row. A cell is the rows of one sample and group.

    From the mean, which a heavy tail pulls away from the values, all small ones would be as far, like a tail; and so would a small sample
    far from a large one, from the median of both.
    """
    values, groups = pooled.ravel(), np.repeat(cells, pooled.shape[1])
    counts = np.bincount(groups)
    first = np.cumsum(counts) - counts
    ordered = np.append(values[np.lexsort((values, groups))], 0.0)  # one more: a number without rows may come last
    centre = (ordered[first + np.maximum(counts - 1, 0) // 2] + ordered[first + counts // 2]) / 2
    return np.abs(values - centre[groups]).reshape(pooled.shape).mean(1)


def estimate_tail(values: Float[np.ndarray, " row"]) -> tuple[float, float]:
    """The tail index of the law of positive values, and by how much the root of its second moment is larger than that of the sample.

    The index is 1/2 at least if one value makes half of the second moment, from 25 values on; of fewer it is 1/4.

    A sample often lacks the largest values of a heavy tail, so its own variance is too small. In place of its largest values the second
    moment has those of a generalised Pareto law with their mean and this index k; from k = 1/2 on it is infinite. The index is that of
    Zhang and Stephens (Technometrics 51, 2009), with a prior as in Vehtari et al. (JMLR 25, 2024), App. C: 20 values that say 1/4.
    """
    values = values / (values.max() or 1.0)  # squares of large ones would overflow
    ordered = np.sort(values)
    count = min(len(values) // 5, int(3 * math.sqrt(len(values))))
    start = ordered[-count - 1]
    excess = ordered[len(ordered) - count :] - start
    excess = excess[excess > 0]
    count = len(excess)
    if count < 5:
        return 0.25, 1.0
    trials = 30 + int(math.sqrt(count))
    theta = 1 / excess[-1] + (1 - np.sqrt(trials / (np.arange(trials) + 0.5))) / (3 * excess[int(count / 4 + 0.5) - 1])
    k = np.log1p(-theta[:, None] * excess).mean(1)
    likelihood = count * (np.log(-theta / k) - k - 1)
    weight = np.exp(likelihood - likelihood.max())
    index = float(np.log1p(-np.sum(weight * theta) / weight.sum() * excess).mean())
    index = (count * index + 20 * 0.25) / (count + 20)
    largest = ordered[-1] ** 2 / float(np.sum(ordered**2))
    if index >= 0.5 or largest > 0.5:  # such a path is often the only one that exploded: those before it say nothing of it
        return max(index, 0.5), math.inf
    # of start + Z, where Z has the excess's mean e: E[Z²] = 2 e² (1 - k)/(1 - 2k)
    mean = float(excess.mean())
    tail = start**2 + 2 * start * mean + 2 * mean**2 * (1 - index) / (1 - 2 * index)
    missing = count * tail - float(np.sum((start + excess) ** 2))
    return index, math.sqrt(1 + max(0.0, missing) / float(np.sum(values**2)))
