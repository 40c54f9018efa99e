"""`check_contract`: every check that a layer must pass, in one call."""

from __future__ import annotations

from shaped.layers.attention import ShapedAttention
from shaped.layers.base import Layer, ResidualLayer, check_layer
from shaped.layers.feedforward import FeedForward, ShapedFeedForward
from shaped.testing.law import check_drift_of_branch, check_drift_of_steps, check_module, check_Sigma_of_steps, check_survival
from shaped.testing.limit import check_batches, check_chain, check_noise, check_permutation, check_Sigma, check_solver_step, check_symmetry


def check_contract(layer: Layer, *, m: int = 3, n: int = 64, symmetric: bool = True, control: ResidualLayer | None = None) -> None:
    """Checks the three faces of a layer against each other. It takes about half a minute; the single checks can be called too.

    Args:
        layer: a layer with a limit. Give it a large effect, such as gamma = 0.8: an error of 5 % must be seen.
        m: number of tokens.
        n: the width at which finite networks are compared with the limit, and twice and four times that. A multiple of the heads.
        control: for a residual layer with a small drift, see `check_drift_of_branch`. With it, a hundredth of the samples is enough.
            A feed-forward layer has one by default.
        symmetric: does the layer treat all tokens alike? False for a mask or a bias.
    """
    check_layer(layer)
    if control is None and isinstance(layer, FeedForward):
        control = ShapedFeedForward(layer.gamma, 0.0, 0.0)
    check_symmetry(layer, m)
    check_batches(layer, m)
    check_Sigma(layer, range(2, 7) if symmetric else (m,))
    check_noise(layer, m)
    check_solver_step(layer, m)
    check_chain(layer, ShapedAttention(0.8, 0.4), m)
    if symmetric:
        check_permutation(layer)
    check_module(layer, m)
    check_Sigma_of_steps(layer, m, n)
    if isinstance(layer, ResidualLayer):
        check_drift_of_branch(layer, m, n, samples=800_000 if control is None else 8_000, control=control)
    else:
        check_drift_of_steps(layer, m, 2 * n)
    check_survival(layer, m)
