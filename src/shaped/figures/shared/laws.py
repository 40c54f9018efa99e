"""The law of the SDE against the law of networks, at the last layer: shared by fig1 (right), fig7, output and masks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from shaped.compare import Sample, measure_distances
from shaped.figures.harness.claims import TOLERANCE, Row, judge, judge_agreement, judge_separation
from shaped.figures.harness.simulator import Simulator
from shaped.figures.shared.density import joint_densities, pairs
from shaped.figures.shared.ensembles import FACES, Arrays, make_ensemble, make_jobs, to_trajectory
from shaped.layers import Layer, ShapedAttention, ShapedFeedForward
from shaped.trajectory import Trajectory

RESAMPLES = 400
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
    law_tokens: int = 0
    """Least number of tokens, over all networks, for a claim about a law. The captions' samples are too few to prove an agreement within
    TOLERANCE."""

    def law_samples(self, m: int, simulator: Simulator) -> int:
        """How many networks of m tokens to take for a claim about their law. More tokens give more pairs, so fewer networks suffice."""
        return max(simulator.sample_count(self.samples, m), self.law_tokens // m)


PROVING = 2**17  # law_tokens at the paper's scale
SCALES = {"quick": Settings(samples=2**10), "paper": Settings(law_tokens=PROVING)}


def settings(scale: str) -> Settings:
    return SCALES[scale]


def make_transformer(settings: Settings) -> Layer:
    return ShapedAttention(settings.gamma, settings.tau0) >> ShapedFeedForward(settings.gamma)


def make_law_jobs(name: str, settings: Settings, layer: Layer, simulator: Simulator) -> dict[Key, partial[Arrays]]:
    jobs = {}
    for m in simulator.token_counts:
        ensemble = make_ensemble(settings, layer, m, simulator, step=settings.step, samples=settings.law_samples(m, simulator), single=True)
        jobs |= {(name, m, face): job for face, job in make_jobs(ensemble).items()}
    return jobs


def drop_stopped(arrays: Arrays) -> Trajectory:
    """The paths that did not stop before the last layer."""
    paths = to_trajectory(arrays)
    running = paths.stopped > paths.t[-1]
    return Trajectory(paths.t, paths.V[:, running], paths.stopped[running])


def pair_entries(statistic: str, arrays: Arrays) -> Sample:
    """Entries "rho" or "V" of every pair of tokens at the last layer, of the paths that did not stop."""
    return pairs(getattr(drop_stopped(arrays), statistic)[-1].numpy())


def judge_law(id: str, m: int, claim: str, one: Sample, other: Sample, seed: int, at_least: float | None = None) -> Row:
    """Judges that two laws agree or, given `at_least`, that they differ by that much."""
    if min(len(one), len(other)) < 2:
        why = "one of them explodes before the last layer"
        if at_least is None:
            return judge(id, m, claim, 1.0, (1.0, 1.0), at_most=TOLERANCE, why=why)
        return judge(id, m, claim, 0.0, (0.0, 1.0), at_least=at_least, why=why)
    distance, _ = measure_distances(one, other, RESAMPLES, np.random.default_rng(seed))
    return judge_agreement(id, m, claim, distance) if at_least is None else judge_separation(id, m, claim, distance, at_least)


def judge_pairs(id: str, words: str, statistic: str, found: dict[Key, Arrays], name: str, simulator: Simulator) -> list[Row]:
    """Judges for each number of tokens that network and SDE have the same law of "rho" or "V" over all pairs of tokens."""
    claim = f"{words}: Kolmogorov-Smirnov distance of the {TITLES[statistic]}s"
    rows = []
    for m in simulator.token_counts:
        network, sde = (pair_entries(statistic, found[name, m, face]) for face in FACES)
        rows.append(judge_law(id, m, claim, network, sde, simulator.seed))
    return rows


def estimate_densities(statistic: str, found: dict[Key, Arrays], name: str, simulator: Simulator) -> dict[str, np.ndarray]:
    """Histograms and density estimates of network and SDE, for the number of tokens that is drawn."""
    return joint_densities(statistic, {face: pair_entries(statistic, found[name, simulator.tokens, face]).ravel() for face in FACES})
