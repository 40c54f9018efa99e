"""Tries remedies on a model and measures each: the value of the verdict before and after, and what else changes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from shaped.diagnosis.curves import list_curves
from shaped.diagnosis.numbers import show
from shaped.diagnosis.observation import Observation, observe
from shaped.diagnosis.one_pass.losses import Loss
from shaped.diagnosis.remedies.table import REMEDIES, Remedy, Variant
from shaped.diagnosis.verdicts import RULES, Finding, judge, measure_risk
from shaped.engine.progress import progress_bar
from shaped.nn.compiled import unwrap
from shaped.process import quote_error

PASSES = 12
"""Forward and backward passes at most."""
NEARER = 0.3  # decades, a factor of 2


@dataclass(frozen=True)
class Trial:
    """One remedy for one verdict, measured with the same batch and weights."""

    verdict: str
    stack: str
    remedy: str
    reason: str
    quantity: str
    before: float
    after: float
    removed: bool
    """Is the verdict gone?"""
    gain: float
    """How many decades the value came nearer to its threshold."""
    appeared: tuple[str, ...]
    """Verdicts that were not there before."""
    risk: float
    code: str
    problem: str = ""
    """Why it was not tried; empty if it was."""

    @property
    def outcome(self) -> str:
        """In words."""
        if self.problem:
            return f"not tried: {self.problem}"
        if not self.removed:
            return "nearer to the threshold, not enough" if self.gain >= NEARER else "tried, did not help"
        return f"removes the verdict, but then: {', '.join(self.appeared)}" if self.appeared else "removes the verdict"

    @property
    def numbers(self) -> str:
        return "" if self.problem else f"{self.quantity} {show(self.before)} → {show(self.after)}"

    def __str__(self) -> str:
        return f"{self.remedy}: " + "; ".join(part for part in (self.numbers, self.outcome, self.code if self.removed else "") if part)


class Trials(tuple[Trial, ...]):
    """Printed, one a line."""

    def of(self, finding: Finding) -> Trials:
        return Trials(trial for trial in self if (trial.verdict, trial.stack) == (finding.name, finding.stack))

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "no remedy was tried"


@dataclass(frozen=True)
class Attempt:
    """A model that was observed with a change, or why it was not."""

    observation: Observation | None
    findings: tuple[Finding, ...]
    problem: str = ""


def try_remedies(
    model: nn.Module, batch: Any, seen: Observation, *, loss: Loss | None = None, passes: int = PASSES, progress: bool | None = None
) -> Trials:
    """Every remedy for every verdict of what was seen. Of a remedy with a number, the mildest that removes the verdict is reported.

    The weights stay as they are, so that it costs no copy of the model. It says what the change does to this batch, not how it trains.
    """
    before = judge(seen)
    verdicts = [finding for finding in before if finding.at_risk]
    uses_hf = takes_hf_shape(model)
    with progress_bar(progress, passes, "trying remedies") as advance:
        attempts: dict[str, Attempt] = {}

        def attempt(remedy: Remedy, variant: Variant) -> Attempt:
            """One pass, or the result of an earlier one."""
            if variant.code not in attempts:
                if len(attempts) >= passes:
                    return Attempt(None, (), f"more than {passes} passes")
                attempts[variant.code] = observe_changed(model, batch, loss, remedy, variant)
                advance(1)
            return attempts[variant.code]

        trials: list[Trial] = []
        for finding in verdicts:
            depth = max(len(stack.layers) for stack in seen.stacks if finding.stack in ("", stack.name))
            made = [choose_trial(finding, before, one, one.list_variants(depth), attempt, uses_hf) for one in list_remedies(finding, seen)]
            trials += sorted(made, key=lambda trial: (bool(trial.problem), not trial.removed, len(trial.appeared)))
    return Trials(trials)


def list_remedies(finding: Finding, seen: Observation) -> tuple[Remedy, ...]:
    """Those of the table. No other function repairs a weight that is not finite."""
    return () if seen.non_finite.startswith("parameter") else REMEDIES[finding.name]


def observe_changed(model: nn.Module, batch: Any, loss: Loss | None, remedy: Remedy, variant: Variant) -> Attempt:
    change = variant.make()
    try:
        observation = observe(model, batch, loss, change)
    except (ValueError, RuntimeError) as error:  # also too little memory: the other results are worth keeping
        return Attempt(None, (), quote_error(error, 120))
    if not change.applied:
        return Attempt(None, (), remedy.if_unused)
    return Attempt(observation, judge(observation))


def choose_trial(
    finding: Finding,
    before: tuple[Finding, ...],
    remedy: Remedy,
    variants: tuple[Variant, ...],
    attempt: Callable[[Remedy, Variant], Attempt],
    uses_hf: bool,
) -> Trial:
    """The first variant that removes the verdict and adds none; else one that removes it; else the one that comes nearest."""
    tried: list[tuple[tuple[float, ...], Trial]] = []
    for variant in variants:
        found = attempt(remedy, variant)
        trial, decades = compare(finding, before, remedy, variant, found, uses_hf)
        if trial.removed and not trial.appeared:
            return trial
        tried.append(((bool(trial.problem), not trial.removed, len(trial.appeared) if trial.removed else decades), trial))
        if found.observation is None:
            break
    return min(tried, key=lambda one: one[0])[1]


def compare(
    finding: Finding, before: tuple[Finding, ...], remedy: Remedy, variant: Variant, found: Attempt, uses_hf: bool
) -> tuple[Trial, float]:
    """The trial, and how many decades the value is still beyond its threshold."""
    after, removed, decades = math.nan, False, math.inf
    had = {(one.stack, RULES[one.name].quantity) for one in before if one.at_risk}
    has = [one for one in found.findings if one.at_risk]
    if found.observation is not None:
        same = find_same(finding, found.findings)
        after = same.value if same else read_silent_value(finding, found.observation)
        is_finite = math.isfinite(after) and not found.observation.non_finite  # else it is not nearer to anything
        removed = is_finite and not (same and same.at_risk)
        decades = (same.decades if same else -math.inf) if is_finite else math.inf
    trial = Trial(
        verdict=finding.name,
        stack=finding.stack,
        remedy=variant.name if found.observation is not None else remedy.name,
        reason=remedy.reason,
        quantity=RULES[finding.name].quantity,
        before=finding.value,
        after=after,
        removed=removed,
        gain=finding.decades - decades if found.observation is not None else 0.0,
        appeared=tuple(dict.fromkeys(one.name for one in has if (one.stack, RULES[one.name].quantity) not in had)),
        risk=measure_risk(found.findings) if found.observation is not None else math.nan,
        code=variant.hf_code if uses_hf and variant.hf_code else variant.code,
        problem=found.problem,
    )
    return trial, decades


def find_same(finding: Finding, findings: Iterable[Finding]) -> Finding | None:
    """What the same rule found."""
    return next((one for one in findings if one.stack == finding.stack and RULES[one.name].quantity == RULES[finding.name].quantity), None)


def read_silent_value(finding: Finding, observation: Observation) -> float:
    """The value where a rule says nothing.

    That of rank collapse is silent where the correlation falls over the layers, that of bounded attention where one key can get everything.
    """
    stack = next((one for one in observation.stacks if one.name == finding.stack), None)
    if finding.name == "rank collapse" and stack is not None:
        return list_curves(stack)["correlation"][-1]
    if finding.name == "bounded attention" and stack is not None:
        return 1.0
    return observation.loss if finding.name == "non-finite values" else math.nan


def takes_hf_shape(model: nn.Module) -> bool:
    """Can `shaped.hf.shape` shape this model?"""
    model = unwrap(model)
    transformers = sys.modules.get("transformers")  # a model of it has loaded it
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return False
    from shaped.hf.attention import bypasses_interface, find_other_softmax, is_cross_attention, merges_sequences, uses_interface
    from shaped.hf.configuration import ShapedConfig

    parts = list(model.modules())
    through = [part for part in parts if uses_interface(type(part))]
    own = any(bypasses_interface(type(part)) for part in parts)
    other = any(find_other_softmax(part) or merges_sequences(type(part)) for part in through)
    attends = any(not is_cross_attention(part) for part in through)
    return attends and not own and not other and not isinstance(model.config, ShapedConfig)
