"""How much is simulated for a question at each stage, so that a stage takes about as long for every question.

Stage 0 is a preview within a fraction of a second, mostly from the SDE. Stage 1 has few networks, stage 2 many.
"""

from __future__ import annotations

from dataclasses import dataclass

from shaped.explore.fields import Question, round_up

LAST = 2
LAYER = 1.5e-3
"""Seconds that a block of a network takes, whatever its size: the overhead of some hundred small operations."""
HEADS = 4
"""Heads, one after another, that take as long as the rest of a block."""
NORMAL = 12e-9
"""Seconds for one of the m·n normals of a sample's feed-forward layer."""
PREVIEW_STEPS, PREVIEW_PATHS, PREVIEW_BLOCKS = 12, 48, 4
LONGEST_STEP, MOST_STEPS = 0.01, 512
RESAMPLES = 100
"""For the band of one law. More would take longer than a cancelled question may go on."""
FRAMES = 32
"""Layers that are recorded, about."""
PREVIEW_WIDTH = 8
"""Of the small network whose gradients stand for those of the large one; its depth over width is the same."""


@dataclass(frozen=True)
class Plan:
    """Numbers of samples for one question at one stage."""

    question: Question
    stage: int

    def count(self, seconds: float, least: int, most: int, cost: float = 1.0) -> int:
        """The power of two of samples that about so many seconds are enough for; `cost` is that of a layer over a plain forward pass.

        One sample has the overhead of many. So they may always take a quarter of it, however little time it leaves.
        """
        asked = self.question
        overhead = cost * LAYER * asked.depth * (1 + asked.heads / HEADS)
        left = max(seconds - overhead, overhead / 4)
        fits = left / (cost * NORMAL * asked.depth * asked.tokens * (asked.width + asked.tokens**2))
        return max(least, min(most, 2 ** max(0, int(fits).bit_length() - 1)))

    @property
    def steps(self) -> int:
        """Of the SDE."""
        usual = max(PREVIEW_STEPS, min(MOST_STEPS, round_up(self.question.time / LONGEST_STEP)))
        return PREVIEW_STEPS if self.stage == 0 else usual

    @property
    def paths(self) -> int:
        """Of the SDE."""
        large = max(1, self.question.tokens**2 * self.steps // 8192)
        return max(16, (PREVIEW_PATHS, 256, 2048)[self.stage] // large)

    @property
    def record(self) -> int:
        """Every how many layers a network is recorded."""
        return max(1, round_up(self.question.depth / FRAMES))

    @property
    def record_steps(self) -> int:
        """Every how many steps the SDE is recorded."""
        return max(1, round_up(self.steps / FRAMES))

    @property
    def networks(self) -> int:
        """Held against the SDE."""
        return self.count(0.5, 4, 64) if self.stage < 2 else self.count(2.5, 8, 1024)

    @property
    def compared(self) -> int:
        """Of each kind of block. LayerNorm has to make the tokens, so a layer costs more."""
        return self.count(0.5, 2, 8, 2.0) if self.stage < 2 else self.count(1.5, 4, 32, 2.0)

    @property
    def differentiated(self) -> int:
        """Shaped networks whose gradients are drawn."""
        return (4, self.compared_differentiated, self.count(2.0, 2, 64, 4.0))[self.stage]

    @property
    def compared_differentiated(self) -> int:
        """Networks of each kind of block whose gradients are drawn, at stage 1. Layers take the time, so no later stage has more."""
        return self.count(0.5, 2, 8, 4.0)

    @property
    def cell(self) -> int:
        """Samples of a cell of the map: paths of the SDE at stage 0, then networks."""
        return 8 if self.stage == 0 else self.count(0.3, 2, 8)

    @property
    def proof(self) -> int:
        """The most networks of a cell that may be simulated to prove that it is safe."""
        return self.count(4.0, 0, 4096)

    def shrink(self) -> tuple[int, int]:
        """Width and depth of a small network with about the same depth over width."""
        asked = self.question
        heads = asked.heads
        least = heads * round_up(max(PREVIEW_WIDTH, asked.tokens) / heads)
        width = min(asked.width, max(least, heads * round_up(PREVIEW_BLOCKS / asked.time / heads)))
        return width, max(1, min(asked.depth, 2 * PREVIEW_BLOCKS, round(width * asked.time)))
