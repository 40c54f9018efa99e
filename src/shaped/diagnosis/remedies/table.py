"""Which remedies are tried for which verdict, why, and the line of code that each one is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shaped.diagnosis.remedies.branches import WeakenBranches
from shaped.diagnosis.remedies.changes import CallChange, DivideLogits, LeakThroughReLU, NormaliseQueriesAndKeys, ShapeAttention

GAMMAS = (1.0, 0.5, 0.2, 0.1)
TEMPERATURES = (3.0, 10.0)
SLOPE = 0.1
FUNCTIONS = "shaped.nn.functional"


@dataclass(frozen=True)
class Variant:
    """A remedy with its numbers."""

    name: str
    make: Callable[[], CallChange]
    code: str
    """What to write, in any PyTorch model."""
    hf_code: str = ""
    """What to write where `shaped.hf.shape` takes the model."""


@dataclass(frozen=True)
class Remedy:
    name: str
    reason: str
    list_variants: Callable[[int], tuple[Variant, ...]]
    """From the number of layers, the mildest first."""
    if_unused: str
    """Why it could not be tried, where nothing of the model was changed by it."""


def list_shapings(depth: int) -> tuple[Variant, ...]:
    return tuple(
        Variant(
            f"shape attention with gamma {gamma:g}",
            lambda gamma=gamma: ShapeAttention(gamma),
            f"{'' if gamma == 1.0 else f'{gamma:g} * '}{FUNCTIONS}.shaped_attention(q, k, v, …) in place of scaled_dot_product_attention",
            f"shaped.hf.shape(model{'' if gamma == 1.0 else f', gamma={gamma:g}'})",
        )
        for gamma in GAMMAS
    )


def list_weaker_branches(depth: int) -> tuple[Variant, ...]:
    """The factor of Noci et al. 2022 for two branches a layer, and its square."""
    factors = {"√(2 · layers)": (2 * depth) ** -0.5, "2 · layers": 0.5 / depth}
    return tuple(
        Variant(
            f"divide residual branches by {name}",
            lambda factor=factor: WeakenBranches(factor),
            f"x + {factor:.3g} * branch(x) in place of x + branch(x), or the last weights of each branch times {factor:.3g}",
        )
        for name, factor in factors.items()
    )


def list_norms(depth: int) -> tuple[Variant, ...]:
    code = f"q, k = {FUNCTIONS}.rms_norm(q), {FUNCTIONS}.rms_norm(k) before the attention"
    return (Variant("QK-norm", NormaliseQueriesAndKeys, code),)


def list_temperatures(depth: int) -> tuple[Variant, ...]:
    return tuple(
        Variant(f"divide logits by {tau:g}", lambda tau=tau: DivideLogits(tau), f"q / {tau:g} in place of q in the attention")
        for tau in TEMPERATURES
    )


def list_sharper_logits(depth: int) -> tuple[Variant, ...]:
    return tuple(
        Variant(
            f"multiply logits by {factor:g}",
            lambda factor=factor: DivideLogits(1 / factor),
            f"{factor:g} * q in place of q in the attention",
        )
        for factor in (10.0, 100.0)
    )


def list_leaks(depth: int) -> tuple[Variant, ...]:
    code = f"torch.nn.functional.leaky_relu(x, {SLOPE:g}) in place of relu(x)"
    return (Variant(f"leaky ReLU with slope {SLOPE:g}", lambda: LeakThroughReLU(SLOPE), code),)


NO_SELF_ATTENTION = "the model has no attention with as many queries as keys"
NO_ATTENTION = "no attention was seen"
SHAPE = Remedy(
    "shaped attention", "Noci et al. 2023: attention near the identity does not average the tokens", list_shapings, NO_SELF_ATTENTION
)
WEAKEN = Remedy(
    "weaker branches",
    "Noci et al. 2022: with branches of order 1/√depth tokens, stream and gradients change by a bounded factor",
    list_weaker_branches,
    "no residual branch x + f(x) was seen",
)
NORMALISE = Remedy(
    "QK-norm", "Henry et al. 2020: logits are bounded, whatever the weights are", list_norms, "the model computes its softmax itself"
)
COOL = Remedy("temperature", "Zhai et al. 2023: entropy falls with the size of the logits", list_temperatures, NO_ATTENTION)
SHARPEN = Remedy("sharper attention", "attention selects as soon as its logits differ", list_sharper_logits, NO_ATTENTION)
LEAK = Remedy("leaky ReLU", "Lu et al. 2019: a unit that always passes a gradient cannot die", list_leaks, "the model has no ReLU")

REMEDIES: dict[str, tuple[Remedy, ...]] = {
    "rank collapse": (SHAPE, WEAKEN),
    "entropy collapse": (NORMALISE, COOL),
    "uniform attention": (NORMALISE, SHARPEN, SHAPE),
    "bounded attention": (SHARPEN,),
    "no gradients": (),
    "vanishing gradients": (SHAPE, WEAKEN, NORMALISE),
    "exploding gradients": (SHAPE, WEAKEN, NORMALISE),
    "growing residual stream": (WEAKEN, SHAPE),
    "shrinking residual stream": (SHAPE,),
    "dead units": (LEAK, SHAPE),
    "non-finite values": (WEAKEN,),
}
