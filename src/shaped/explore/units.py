"""The panels of the page, and the units in which they are computed: panels of one unit share their simulations."""

from __future__ import annotations

PANELS = ("paths", "density", "eigenvalue", "map", "gradients", "entropy", "blocks", "blocks_length", "blocks_gradients", "blocks_entropy")
"""In the order of the page."""
UNITS: dict[str, tuple[str, ...]] = {
    "laws": ("paths", "density", "eigenvalue", "entropy"),
    "blocks": ("blocks", "blocks_length", "blocks_entropy"),
    "gradients": ("gradients", "blocks_gradients"),
    "map": ("map",),
}
"""In the order in which they get a worker."""
STAGES: tuple[tuple[str, ...], ...] = (tuple(UNITS), tuple(UNITS), ("laws", "blocks", "gradients"))
"""The units of each stage. The map goes on to stage 2 by itself: its proofs need what stage 1 found."""
