"""How the matrices of a baseline start: as the theory has them, or as the usual models do."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shaped.nn.modules import ShapedFeedForwardBlock, ShapedSelfAttention, init_normal


@dataclass(frozen=True)
class Initialisation:
    about: str
    """A few words for the commands' help."""
    std: float | None = None
    """Standard deviation of every matrix, whatever its width; None: the one that the modules have by themselves."""
    divides_outputs: bool = False
    """Divide that of the residual branches' outputs by sqrt(2 depth)?"""

    def apply(self, attention: ShapedSelfAttention, feedforward: ShapedFeedForwardBlock, depth: int) -> None:
        """Draws the matrices of one block of a stack of this depth again."""
        if self.std is None:
            return
        for matrix in (attention.query, attention.key, attention.value, feedforward.pre):
            init_normal(matrix, self.std)
        for matrix in (attention.output, feedforward.post):
            init_normal(matrix, self.std / math.sqrt(2 * depth) if self.divides_outputs else self.std)


INITIALISATIONS = {
    "theory": Initialisation("outputs keep the inputs' variance"),
    "bert": Initialisation("0.02 everywhere", std=0.02),
    "gpt2": Initialisation("0.02, residual outputs divided by sqrt(2 depth)", std=0.02, divides_outputs=True),
}
