"""`check_contract`: every check that a layer must pass, in one call."""

from __future__ import annotations

from shaped.layers.attention import ShapedAttention
from shaped.layers.base import Layer, ResidualLayer, check_layer
from shaped.testing.drift import check_drift_of_branch, check_drift_of_steps
from shaped.testing.law import check_module, check_Sigma_of_steps, check_survival
from shaped.testing.limit import check_batches, check_chain, check_noise, check_permutation, check_Sigma, check_solver_step, check_symmetry
from shaped.testing.stats import on_cpu


@on_cpu()
def check_contract(layer: Layer, *, m: int = 3, n: int = 64, symmetric: bool = True, control: Layer | None = None) -> None:
    """Checks the three faces of a layer against each other. It takes about half a minute; the single checks can be called too.

    Args:
        layer: a layer with a limit. Give it a large effect, such as gamma = 0.8: an error of 5 % must be seen.
        m: number of tokens.
        n: the width at which finite networks are compared with the limit, with four times that for Sigma, 16 and 256 times that for the
            drift. A multiple of the heads. Rotary positions with a base are slow to draw: their drift is checked in narrower networks,
            and an error of 5 % in it need not be seen.
        control: a layer with drift 0 that draws the same normals, see `check_drift_of_branch`. Layers of this package have one.
        symmetric: does the layer treat all tokens alike? False for a mask or a bias.
    """
    check_layer(layer)
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
    for part in layer.layers:  # drifts of a chain's layers add; whole steps of a chain are noisy
        if isinstance(part, ResidualLayer):
            own = control if isinstance(control, ResidualLayer) else None
            if isinstance(part, ShapedAttention) and isinstance(part.rope, float):  # slow to draw, see there
                check_drift_of_branch(part, m, 16 * part.heads, samples=4_000, reject=False, control=own)
            else:
                check_drift_of_branch(part, m, n, control=own)
        else:
            check_drift_of_steps(part, m, n, control=control)
    check_survival(layer, m)
