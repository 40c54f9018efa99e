"""How often an answer of advise may be wrong: as often as one of the verdicts that it rests on."""

from types import SimpleNamespace
from typing import Any

from shaped.advice.measurement import Ledger, Place
from shaped.advice.rows import Row
from shaped.advice.search import Trial


class FakeLedger:
    """Of each place so many networks fail, in every stage."""

    def __init__(self, failing: dict[float, int]):
        self.failing, self.records = failing, {}

    def draw(self, place: Place, stage: str, count: int, enough: int | None = None) -> Row:
        self.records[place] = SimpleNamespace(stage=stage, count=count)
        return self.row(place)

    def row(self, place: Place) -> Row:
        return Row("network", place.gamma, place.tau0, self.records[place].count, 0, self.failing[place.gamma], 0.3, 1.0)


def test_every_verdict_that_may_be_wrong_is_counted_once():
    """A refutation is as often wrong as a proof. A place with a proof and a refutation of other networks has two chances."""
    given: Any = FakeLedger({0.2: 2, 0.3: 0, 0.4: 100})
    ledger: Ledger = given
    trial = Trial(0.01, 299)
    assert trial.prove(ledger, 1.0, 0.2) == "open"
    assert [trial.refute(ledger, 1.0, gamma) for gamma in (0.3, 0.3)] == ["open"] * 2
    assert (trial.proofs, len(trial.verdicts)) == (1, 2)
    assert trial.refute(ledger, 1.0, 0.2) == "open"
    assert (trial.proofs, len(trial.verdicts)) == (1, 3)
    assert trial.prove(ledger, 1.0, 0.4) == trial.refute(ledger, 1.0, 0.4) == "unsafe"
    assert (trial.proofs, len(trial.verdicts)) == (2, 4)  # the refutation has taken the proof's verdict
