"""The law of the SDE against that of networks at the last layer: what figures 1 (right), 7 and masks have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from shaped.compare import compare
from shaped.figures.claims import TOLERANCE, Row, agreement, row
from shaped.figures.density import joint_densities
from shaped.figures.ensembles import FACES, Arrays, ensemble_at, jobs, trajectory
from shaped.figures.lab import Lab
from shaped.layers import Layer, ShapedAttention, ShapedFeedForward

Pair = tuple[int, int] | None
Key = tuple[str, int, str]
TITLES = {"rho": "correlation", "V": "covariance"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Fig. rho_path_density and Fig. covariance_SDE_vs_NN; V0 has unit diagonal, so that its entries are rho."""

    n: int = 200
    d: int = 150
    gamma: float = 8**-0.5
    tau0: float = 1.0
    rho: float = 0.2
    step: float = 0.01
    samples: int = 2**12


SCALES = {"quick": Settings(samples=2**10), "paper": Settings()}


def settings(scale: str) -> Settings:
    return SCALES[scale]


def transformer(settings: Settings) -> Layer:
    return ShapedAttention(settings.gamma, settings.tau0) >> ShapedFeedForward(settings.gamma)


def law_jobs(name: str, settings: Settings, layer: Layer, lab: Lab) -> dict[Key, partial[Arrays]]:
    return {
        (name, m, face): job for m in lab.counts for face, job in jobs(ensemble_at(settings, layer, m, lab, step=settings.step)).items()
    }


def pair_claims(
    id: str, words: str, statistic: str, found: dict[Key, Arrays], name: str, lab: Lab, pair: Pair = None, last: bool = False
) -> list[Row]:
    """Whether the two laws of "rho" or "V" agree, for each number of tokens; over all pairs, one pair, or the last two tokens."""
    rows = []
    for m in lab.counts:
        one, other = (trajectory(found[name, m, face]) for face in FACES)
        tokens = (m - 2, m - 1) if last else pair
        claim = f"{words}: Kolmogorov-Smirnov distance of the {TITLES[statistic]}s"
        if min(int((path.stopped > path.t[-1]).sum()) for path in (one, other)) < 2:
            rows.append(row(id, m, claim, 1.0, (1.0, 1.0), at_most=TOLERANCE, why="one of them explodes before the last layer"))
            continue
        distance = compare(one, other, statistics=(statistic,), pair=tokens, seed=lab.seed).ks[statistic]
        rows.append(agreement(id, m, claim, distance))
    return rows


def drawn_densities(statistic: str, found: dict[Key, Arrays], name: str, lab: Lab, pair: Pair = None) -> dict[str, np.ndarray]:
    """Histograms and density estimates of the paths that did not stop, at the last layer, for the tokens that are drawn."""
    samples: dict[str, np.ndarray] = {}
    m = lab.tokens
    rows, columns = np.triu_indices(m, 1) if pair is None else ([pair[0]], [pair[1]])
    for face in FACES:
        paths = trajectory(found[name, m, face])
        running = paths.stopped > paths.t[-1]
        samples[face] = getattr(paths, statistic)[-1][running].numpy()[:, rows, columns].ravel()
    return joint_densities(statistic if pair is None else f"{statistic}{pair[0]}{pair[1]}", samples)
