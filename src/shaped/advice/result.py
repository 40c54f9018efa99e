"""Advice: what `advise` returns, as rows, as text, as JSON and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shaped.advice.question import Question
from shaped.advice.rows import Boundary, Row
from shaped.files import replace_non_finite

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Advice:
    """The largest safe gamma, how sure it is, and what it is compared with."""

    question: Question
    boundaries: list[Boundary]
    """For each tau0: that of the networks and that of the limit."""
    rows: list[Row]
    """Everything that was simulated of shaped blocks, by law, tau0 and gamma."""
    compared: list[Row]
    """Unshaped, Pre-LN and Post-LN blocks of the same size."""
    answer: Boundary
    """The networks' boundary at the tau0 that allows the largest gamma."""
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> Row | None:
        """The largest gamma at which networks are safe, with the tau0 that allows it; None if there is none."""
        return self.answer.below

    @property
    def proved(self) -> bool:
        """Is `best` safe, and the next gamma unsafe or beyond the grid? Without `best`: is the smallest gamma unsafe?"""
        found = self.answer
        return (found.below is None or self.judge(found.below) == "safe") and (found.above is None or self.judge(found.above) == "unsafe")

    def judge(self, row: Row) -> str:
        """A row's verdict for the share that was asked for: "safe", "unsafe" or "open"."""
        return row.verdict(self.question.share)

    @property
    def sentence(self) -> str:
        """The answer in words."""
        below, above, unsafe = self.answer.below, self.answer.above, self.answer.unsafe
        if below is None:
            assert above is not None
            proof = "" if self.proved else "; these samples do not prove it"
            return f"No gamma is safe: even {describe_place(above)}{proof}."
        said = f"largest gamma that is proved to be safe is {describe_place(below)}"
        if above is None:
            return f"The {said}. It is the largest that was tried."
        if above is unsafe:
            return f"The {said}. The next, {describe_place(above)}: it is unsafe."
        end = "none is proved to be unsafe" if unsafe is None else f"{describe_place(unsafe)}: it is unsafe"
        return f"The {said}. The next, {describe_place(above)}: these samples do not prove what it is. Above, {end}."

    def to_dict(self) -> dict[str, Any]:
        """For JSON: all numbers, and nothing infinite."""

        def show(row: Row | None) -> dict[str, Any] | None:
            if row is None:
                return None
            gradient = None if row.gradient is None else asdict(row.gradient)
            shown = asdict(row) | {"share": row.share, "interval": row.interval, "verdict": self.judge(row), "gradient": gradient}
            return replace_non_finite(shown)

        return {
            "question": self.question.describe(),
            "answer": self.sentence,
            "proved": self.proved,
            "best": show(self.best),
            "above": show(self.answer.above),
            "unsafe": show(self.answer.unsafe),
            "boundaries": [
                {"law": one.law, "tau0": one.tau0, "below": show(one.below), "above": show(one.above), "unsafe": show(one.unsafe)}
                for one in self.boundaries
            ],
            "compared": [show(row) for row in self.compared],
            "rows": [show(row) for row in self.rows],
            "info": self.info,
        }

    def draw(self) -> Figure:
        """The map of gamma and tau0, and the shares that fail. It needs matplotlib."""
        from shaped.advice.picture import draw_advice

        return draw_advice(self.question, self.rows, self.boundaries, self.best)

    def __str__(self) -> str:
        return "\n".join((self.sentence, *format_table(self), *describe_terms(self)))

    def __repr__(self) -> str:
        best = "none" if self.best is None else f"gamma={self.best.gamma:.3g}, tau0={self.best.tau0:.3g}"
        return f"Advice({best}, {'proved' if self.proved else 'not proved'}, {len(self.rows)} rows)"


def describe_share(row: Row) -> str:
    low, high = row.interval
    return f"{100 * row.share:.3g} % ({100 * low:.3g} to {100 * high:.3g})"


def describe_place(row: Row) -> str:
    return f"{row.gamma:.3g} at tau0 = {row.tau0:.3g}, where {describe_share(row)} of {row.count} networks fail"


COLUMNS = ("block", "tau0", "gamma", "networks", "align", "explode", "fail, %", "|rho|", "growth", "gradients", "")


def format_table(advice: Advice) -> Iterator[str]:
    """Each boundary's two rows, then the blocks to compare with."""
    cells = [COLUMNS]
    for boundary in advice.boundaries:
        rows = dict.fromkeys((boundary.below, boundary.above, boundary.unsafe))
        cells += [format_row(row, advice.judge(row)) for row in rows if row is not None]
    cells += [format_row(replace(row, tau0=math.nan), "") for row in advice.compared]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = (0, 6, 9, 10)  # columns of words and of intervals
    for row in cells:
        padded = [
            cell.ljust(width) if place in left else cell.rjust(width) for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(padded).rstrip()


def format_row(row: Row, verdict: str) -> tuple[str, ...]:
    spread = row.gradient
    gradient = "" if spread is None else f"{spread.ratio:.2g} ({spread.interval[0]:.2g} to {spread.interval[1]:.2g})"
    gamma = "" if row.law in ("Pre-LN", "Post-LN") else f"{row.gamma:.3f}"
    tau0 = "" if math.isnan(row.tau0) else f"{row.tau0:.3f}"
    counts = (str(row.count), str(row.aligned), str(row.exploded), describe_share(row).replace(" %", ""))
    name = {"network": "shaped"}.get(row.law, row.law)
    return name, tau0, gamma, *counts, f"{row.correlation:.2f}", f"{row.growth:.2g}", gradient, verdict


def describe_terms(advice: Advice) -> Iterator[str]:
    """What the columns mean."""
    asked = advice.question
    yield "fail: the share that aligns or explodes; each end of an interval holds with 95 % confidence (exact binomial)."
    yield f"align: |rho|, the mean absolute correlation of pairs of tokens after the last layer, is above {asked.correlation:g}."
    yield f"explode: the stream is more than {asked.growth:g} times as long after the last layer as before the first (growth)."
    yield "limit: paths of the covariance SDE of the same block, with n hidden features."
    spreads = [row.gradient for row in (*advice.rows, *advice.compared) if row.gradient is not None]
    if spreads:
        fewest, most = min(spread.networks for spread in spreads), max(spread.networks for spread in spreads)
        of = f"{most if fewest == most else f'{fewest} to {most}'} networks with {spreads[0].tokens} tokens"
        yield f"gradients: squared gradient of the first layer's tokens over that of the last layer's; median of {of}, and its interval."
    yield "A Pre-LN stream grows by design, and its norms undo that inside the branches: there it is no explosion."
    tried = advice.info.get("verdicts", 0)
    if tried > 1:
        confidence = max(0, 100 - 5 * tried)
        yield f"The answer rests on {tried} verdicts, of proofs and refutations: that none is wrong holds with {confidence} % confidence."
