"""The panels of an answer, in units that share their simulations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shaped.explore.panels.blocks import answer_blocks
from shaped.explore.panels.gradients import answer_gradients
from shaped.explore.panels.laws import answer_laws
from shaped.explore.panels.safety import answer_map
from shaped.explore.panels.unit import Breathe, Found
from shaped.explore.plan import Plan

Answer = Callable[[Plan, Breathe], Iterator[Found]]
ANSWERS: dict[str, Answer] = {"laws": answer_laws, "map": answer_map, "gradients": answer_gradients, "blocks": answer_blocks}
"""By the names of `shaped.explore.units.UNITS`, which knows the panels of each."""
