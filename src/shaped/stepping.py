"""Estimates the error that the solver's step causes in the law. Warns if it exceeds the sampling error."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from shaped.covariance import correlation
from shaped.trajectory import Trajectory

PAIRS = 16  # the smallest number of pairs of paths for an estimate
WORDS = {
    "rho_mean": "the mean of rho",
    "rho_spread": "the spread of rho",
    "log_variance_mean": "the mean of log V",
    "log_variance_spread": "the spread of log V",
    "stopped_share": "the share of stopped paths",
}
ORDER = dict.fromkeys(WORDS, 1.0) | {"stopped_share": 0.5}
"""The order of the error in the step h. Stopping has order 1/2: a path that crosses a bound and returns within one step is missed."""


class StepWarning(UserWarning):
    """The solver's step changes the law by more than the sampling error."""


@dataclass(frozen=True)
class StepEffect:
    """The change of each number at the horizon when the step is halved, with its standard error. None if the number does not exist.

    To first order in the step, the solver's error is twice the change, with the opposite sign. The share of stopped paths has order 1/2:
    there the error is 3.4 times the change.
    """

    rho_mean: tuple[float, float] | None
    """Mean of the correlation over pairs of tokens and paths that did not stop."""
    rho_spread: tuple[float, float] | None
    """Its standard deviation over the same."""
    log_variance_mean: tuple[float, float] | None
    """Mean of the logarithm of the tokens' variances."""
    log_variance_spread: tuple[float, float] | None
    stopped_share: tuple[float, float]
    pairs: int
    """Paths that were simulated with both steps."""

    @classmethod
    def of(cls, paths: Trajectory) -> StepEffect:
        """From pairs of paths, coarse and fine in turn."""
        running = paths.stopped > paths.t[-1]
        coarse, fine = (moments(paths.V[-1, place::2], running[place::2]) for place in (0, 1))
        found: dict[str, Any] = dict.fromkeys(WORDS)
        for name in coarse.keys() & fine.keys():
            (before, influence), (after, other) = coarse[name], fine[name]
            found[name] = after - before, standard_error(other - influence)
        pairs = len(running) // 2
        change, error = found["stopped_share"]
        found["stopped_share"] = change, max(error, 1.0 / pairs)  # if no pair differs, the error is not 0: use one pair
        return cls(**found, pairs=pairs)


def warn_of_step(effect: StepEffect, paths: Trajectory, steps: int) -> None:
    """Warns if the step's error exceeds the sampling error of the paths by 3 standard errors of the estimate."""
    told, more = [], 1.0
    for name, (_, influence) in moments(paths.V[-1], paths.stopped > paths.t[-1]).items():
        change, doubt = getattr(effect, name) or (0.0, math.inf)
        noise = standard_error(influence) or 1.0 / len(influence)  # no path stopped, or all did
        whole = 1.0 / (1.0 - 0.5 ** ORDER[name])  # the step's error, in units of what halving it changes
        if whole * (abs(change) - 3.0 * doubt) > noise:
            told.append(f"{WORDS[name]} by {change:+.2g} ± {doubt:.1g} (sampling error {noise:.1g})")
            more = max(more, (whole * abs(change) / noise) ** (1.0 / ORDER[name]))
    if told:
        wanted = steps * 2 ** math.ceil(math.log2(more))
        warnings.warn(
            f"steps = {steps} are seen in the law: halving the step changes {', '.join(told)}; about steps={wanted} would not be",
            StepWarning,
            stacklevel=3,
        )


def moments(V: Float[Tensor, "sample m m"], running: Bool[Tensor, " sample"]) -> dict[str, tuple[float, Float[Tensor, " sample"]]]:
    """The numbers of the law, each with its influence function: one value a path, whose standard error is that of the number."""
    running = running.double()
    share = running.mean()
    found = {"stopped_share": (1.0 - share.item(), share - running)}
    if share == 0.0:
        return found
    V = V.double().cpu()
    numbers = {"log_variance": V.diagonal(dim1=-2, dim2=-1).clamp(min=torch.finfo(V.dtype).tiny).log()}
    if V.shape[-1] > 1:
        rows, columns = torch.triu_indices(V.shape[-1], V.shape[-1], 1, device=V.device)
        numbers["rho"] = correlation(V)[:, rows, columns]
    for name, x in numbers.items():
        mean = (running @ x.mean(1)) / running.sum()
        squares = (x - mean).square().mean(1)
        variance = (running @ squares) / running.sum()
        spread = variance.sqrt().item()
        found[f"{name}_mean"] = mean.item(), running * (x.mean(1) - mean) / share
        found[f"{name}_spread"] = spread, running * (squares - variance) / (2.0 * max(spread, 1e-300) * share)
    return found


def standard_error(influence: Float[Tensor, " sample"]) -> float:
    return (influence.std() / math.sqrt(len(influence))).item() if len(influence) > 1 else math.inf
