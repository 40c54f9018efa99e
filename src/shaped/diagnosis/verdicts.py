"""The rules: from the curves of a model to verdicts in words and one number, its risk. They were fixed before any study of trained models.

A rule says how far a value is beyond its threshold, in decades: 0 at the threshold, 1 ten times beyond. The odds of a stack are the sum of
10^decades over the rules, and its risk is odds/(1 + odds). So risk is 1/2 or more where a threshold is reached, or where several are near,
and it grows with every excess. The model's risk is that of its worst stack.

The papers describe the effects. The thresholds are our own choice: no paper has them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from shaped.diagnosis.curves import list_curves
from shaped.diagnosis.numbers import show
from shaped.diagnosis.observation import Observation, StackObservation

RANK_COLLAPSE = 0.95
"""Correlation behind the last layer. Noci et al. 2022: where the tokens' rank collapses, the gradients of queries and keys vanish at
initialisation. The number is ours: models that train well reach 0.73 at initialisation (GPT-2 XL, docs/predict.md)."""
ENTROPY_COLLAPSE = 0.05
"""Share of the entropy of uniform attention, mean over the heads of a layer. Zhai et al. 2023: low entropy goes with unstable training, up
to divergence. The number is ours: Llama 3.1 405B starts at 0.18 (docs/predict.md)."""
UNIFORM = 1e-5
"""How much of the uniform entropy is missing. Below it the logits are so small (about 0.01) that attention selects nothing, and that
single precision barely resolves it. It is told but does not count as a risk: many models start like this and train, and where averaging
makes tokens alike, the rank collapses."""
BOUNDED = 0.5
"""The largest share that one key can ever get of a query's attention. Below it a head cannot select a token, however long it trains.
Henry et al. 2020 learn the scale of normalised logits for this reason; the number is ours. It is told but does not count as a risk: such
a model trains, and its attention stays an average (docs/diagnose.md, the study)."""
GRADIENT_SPREAD = 100.0
"""Largest over smallest gradient norm of a layer. Xiong et al. 2020: at initialisation the gradients of Post-LN are large near the output,
and without warm-up it does not train well. The number is ours; the paper has none for this ratio."""
STREAM_GROWTH = 10.0
"""Factor of the stream's length over the second half of the layers, or its inverse. Sums of branches grow as the square root of the depth,
1.4 over the second half (docs/predict.md); a factor of 10 is exponential growth."""
DEAD = 0.5
"""Share of dead units in a layer. Lu et al. 2019: the deeper a ReLU network, the likelier it dies at initialisation. The number is ours:
where all tokens are alike, half of the units of a ReLU are dead."""
FARTHEST = 6.0  # decades; beyond, numbers are rounding errors


@dataclass(frozen=True)
class Rule:
    """What is the same for every finding of one name."""

    quantity: str
    """What its value is. Rules of one quantity are one rule: gradients that vanished may explode after a change."""
    threshold: float
    source: str
    curve: str = ""
    """The curve of `shaped.diagnosis.curves` on which it is seen; empty if it is on none."""
    is_on_curve: bool = False
    """Is the threshold a value of that curve?"""
    counts: bool = True
    """In the risk; else it is a notice."""


GRADIENTS = Rule(
    "largest over smallest gradient",
    GRADIENT_SPREAD,
    "Xiong et al. 2020: without warm-up Post-LN does not train at such factors",
    "gradient",
)
STREAM = Rule(
    "growth of the stream", STREAM_GROWTH, "sums of branches grow as the square root of the depth, 1.4 there (docs/predict.md)", "length"
)
RULES: dict[str, Rule] = {
    "rank collapse": Rule(
        "correlation behind the last layer",
        RANK_COLLAPSE,
        "Noci et al. 2022: gradients of queries and keys vanish",
        "correlation",
        is_on_curve=True,
    ),
    "entropy collapse": Rule(
        "smallest share of the uniform entropy",
        ENTROPY_COLLAPSE,
        "Zhai et al. 2023: training diverges as a layer's entropy goes to 0",
        "entropy",
    ),
    "uniform attention": Rule(
        "largest share of the uniform entropy", 1.0 - UNIFORM, "Dong et al. 2021: averaging makes tokens alike", "entropy", counts=False
    ),
    "bounded attention": Rule(
        "largest share that one key can get", BOUNDED, "Henry et al. 2020: normalised logits need a larger scale", "entropy", counts=False
    ),
    "no gradients": Rule("largest gradient", 0.0, "a step would leave their weights as they are", "gradient", counts=False),
    "vanishing gradients": GRADIENTS,
    "exploding gradients": GRADIENTS,
    "growing residual stream": STREAM,
    "shrinking residual stream": STREAM,
    "dead units": Rule("share of dead units", DEAD, "Lu et al. 2019: dying ReLU", "dead", is_on_curve=True),
    "non-finite values": Rule("the loss", 0.0, "a step would make every weight nan"),
}
"""By the name of their verdicts. What is tried for each is in `shaped.diagnosis.remedies.table`."""
NOTICES = tuple(name for name, rule in RULES.items() if not rule.counts)


@dataclass(frozen=True)
class Finding:
    """Where a stack is farthest beyond a rule, or nearest to it. It has the rule's threshold and source, to be read alone."""

    name: str
    stack: str
    layers: tuple[str, ...]
    """Those beyond the threshold, or the nearest one."""
    value: float
    threshold: float
    source: str
    sentence: str
    decades: float
    """How far the value is beyond the threshold; negative on the right side of it."""

    @property
    def at_risk(self) -> bool:
        return self.decades >= 0.0

    def __str__(self) -> str:
        return f"{self.name}: {self.sentence} ({self.source})"


class Verdicts(tuple[Finding, ...]):
    """The findings that are beyond their thresholds, worst first. Printed, one a line."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "no rule found a risk"


def judge(observation: Observation) -> tuple[Finding, ...]:
    """What each rule finds in each stack, the farthest beyond its threshold first."""
    found = [finding for stack in observation.stacks for judge_stack in JUDGES for finding in judge_stack(stack)]
    if observation.non_finite:
        place = observation.non_finite
        sentence = f"the first value that is not finite: {place}"
        found.insert(0, make_finding("non-finite values", "", (), math.nan, sentence, FARTHEST))
    return tuple(sorted(found, key=lambda finding: -finding.decades))


def measure_risk(findings: Iterable[Finding]) -> float:
    """odds/(1 + odds) of the worst stack, its odds being the sum over rules of 10^decades."""
    odds: defaultdict[str, float] = defaultdict(float)
    for finding in findings:
        odds[finding.stack] += 10.0**finding.decades if RULES[finding.name].counts else 0.0
    worst = max(odds.values(), default=0.0)
    return worst / (1.0 + worst)


def make_finding(name: str, stack: str, layers: tuple[str, ...], value: float, sentence: str, decades: float) -> Finding:
    rule = RULES[name]
    return Finding(name, stack, layers, value, rule.threshold, rule.source, sentence, decades)


def judge_rank(stack: StackObservation) -> Iterator[Finding]:
    rho = list_curves(stack)["correlation"]
    first, last = rho[0], rho[-1]
    if math.isnan(last) or last <= first:
        return
    beyond = [layer.name for layer, value in zip(stack.layers, rho[1:], strict=True) if value >= RANK_COLLAPSE]
    sentence = f"tokens are parallel: their mean correlation is {show(last)} behind {stack.layers[-1].name}, threshold {RANK_COLLAPSE}"
    decades = measure_decades((1.0 - RANK_COLLAPSE) / max(1.0 - last, 1e-12))
    yield make_finding("rank collapse", stack.name, tuple(beyond) or (stack.layers[-1].name,), last, sentence, decades)


def judge_entropy(stack: StackObservation) -> Iterator[Finding]:
    shares = list_curves(stack)["entropy_share"]
    low = find_worst(stack, shares, lambda share: measure_decades(ENTROPY_COLLAPSE / max(share, 1e-12)))
    if low:
        layers, value, decades = low
        sentence = f"attention sees one key: {show(value)} of the uniform entropy in {describe(layers)}, threshold {ENTROPY_COLLAPSE}"
        yield make_finding("entropy collapse", stack.name, layers, value, sentence, decades)
    flat = find_worst(stack, shares, lambda share: measure_decades(UNIFORM / max(1.0 - share, 1e-8)))
    if flat:
        layers, value, decades = flat
        sentence = f"attention selects nothing: {show(value)} of the uniform entropy in {describe(layers)}, threshold 1 - {UNIFORM:g}"
        yield make_finding("uniform attention", stack.name, layers, value, sentence, decades)


def judge_bound(stack: StackObservation) -> Iterator[Finding]:
    shares = [min((call.largest_share for call in layer.attention.values()), default=math.nan) for layer in stack.layers]
    if not any(share < 1.0 for share in shares):  # nothing is normalised
        return
    worst = find_worst(stack, shares, lambda share: measure_decades((1.0 - share) / share * BOUNDED / (1.0 - BOUNDED)))
    if worst:
        layers, value, decades = worst
        sentence = (
            f"queries and keys are normalised, and their scale is so small that one key among all gets at most {show(value)} of a query's "
            f"attention in {describe(layers)}, threshold {BOUNDED}, unless gains that train scale them up"
        )
        yield make_finding("bounded attention", stack.name, layers, value, sentence, decades)


def judge_gradients(stack: StackObservation) -> Iterator[Finding]:
    norms = list_curves(stack)["gradient"]
    known = {layer.name: norm for layer, norm in zip(stack.layers, norms, strict=True) if math.isfinite(norm)}
    if known and not any(norm for norm in norms if not math.isnan(norm)):  # nan: nothing of the layer is trained
        sentence = f"every gradient is 0 in {describe(tuple(known))}: the loss does not depend on them, or what reads them has weights of 0"
        yield make_finding("no gradients", stack.name, tuple(known), 0.0, sentence, 0.0)
        return
    if len(known) < 2:
        return
    smallest, largest = min(known, key=lambda name: known[name]), max(known, key=lambda name: known[name])
    ratio = known[largest] / max(known[smallest], 1e-30)
    names = list(known)
    name, verb = ("vanishing gradients", "vanish") if names.index(smallest) < names.index(largest) else ("exploding gradients", "explode")
    sentence = (
        f"on their way back gradients {verb}: norm {show(known[largest])} in {largest}, {show(known[smallest])} in {smallest}, "
        f"a factor of {show(ratio)}, threshold {GRADIENT_SPREAD:g}"
    )
    decades = measure_decades(ratio / GRADIENT_SPREAD)
    yield make_finding(name, stack.name, (smallest, largest), ratio, sentence, decades)


def judge_stream(stack: StackObservation) -> Iterator[Finding]:
    lengths = list_curves(stack)["length"]
    middle, last = lengths[len(stack.layers) // 2], lengths[-1]
    if not (math.isfinite(middle) and math.isfinite(last)) or max(middle, last) == 0.0:
        return
    ratio = last / max(middle, 1e-30)
    name, verb = ("growing residual stream", "grows") if ratio >= 1.0 else ("shrinking residual stream", "shrinks")
    sentence = (
        f"the stream {verb} from {show(middle)} to {show(last)} over the second half of the layers, threshold a factor of {STREAM_GROWTH:g}"
    )
    decades = measure_decades(max(ratio, 1.0 / max(ratio, 1e-30)) / STREAM_GROWTH)
    yield make_finding(name, stack.name, (stack.layers[-1].name,), ratio, sentence, decades)


def judge_units(stack: StackObservation) -> Iterator[Finding]:
    odds = DEAD / (1.0 - DEAD)
    worst = find_worst(stack, list_curves(stack)["dead"], lambda share: measure_decades(share / max(1.0 - share, 1e-12) / odds))
    if worst:
        layers, value, decades = worst
        where = f"{describe(layers)}, threshold {100 * DEAD:g} %"
        sentence = f"{show(100 * value)} % of the activations' units pass no gradient for any token in {where}"
        yield make_finding("dead units", stack.name, layers, value, sentence, decades)


JUDGES: tuple[Callable[[StackObservation], Iterator[Finding]], ...] = (
    judge_rank,
    judge_entropy,
    judge_bound,
    judge_gradients,
    judge_stream,
    judge_units,
)


Worst = tuple[tuple[str, ...], float, float]


def find_worst(stack: StackObservation, values: list[float], measure: Callable[[float], float]) -> Worst | None:
    """The layers beyond a threshold (or the nearest one), the worst value, and how far it is beyond."""
    named = zip((layer.name for layer in stack.layers), values, strict=True)
    known = {name: (measure(value), value) for name, value in named if math.isfinite(value)}
    if not known:
        return None
    worst = max(known, key=lambda name: known[name][0])
    decades, value = known[worst]
    return tuple(name for name, (beyond, _) in known.items() if beyond >= 0.0) or (worst,), value, decades


def measure_decades(ratio: float) -> float:
    return max(-FARTHEST, min(FARTHEST, math.log10(max(ratio, 1e-30))))


def describe(layers: tuple[str, ...]) -> str:
    return layers[0] if len(layers) == 1 else f"{len(layers)} layers from {layers[0]} to {layers[-1]}"
