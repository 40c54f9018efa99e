"""The panels of the page, and the units in which they are computed: panels of one unit share their simulations."""

from __future__ import annotations

PANELS = ("paths", "density", "eigenvalue", "map", "gradients", "entropy", "blocks", "blocks_length", "blocks_gradients", "blocks_entropy")
"""In the order of the page."""
UNITS: dict[str, tuple[str, ...]] = {
    "laws": ("paths", "density", "eigenvalue", "entropy"),
    "gradients": ("gradients",),
    "map": ("map",),
    "blocks": ("blocks", "blocks_length", "blocks_entropy", "blocks_gradients"),
}
"""Cheap ones first."""
