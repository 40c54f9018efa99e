"""The mutation tester's mutants: every kind of change is made, and text is left alone."""

import tomllib
from pathlib import Path
from types import ModuleType

from programs import load_program

ROOT = Path(__file__).parents[2]

SOURCE = '''
"""2 + 2."""
class Layer:
    width: "Float[Tensor, 'm 2']" = 0.5

    def step(self, V, h):
        """1 < 2."""
        if h == 0:
            raise ValueError(f"{h - 1}")
        V.add_(-h)
        V[0] = h if V and not h else where.where(h, V, 2.0)
        return V.mT
'''
CHANGES = {
    "Layer: 0.5 → 0.525",
    "Layer.step: if h == 0: → if not h == 0:",
    "Layer.step: h == 0 → h != 0",
    "Layer.step: 0 → 1",
    "Layer.step: 0 → -1",
    "Layer.step: V.add_(-h) → (removed)",
    "Layer.step: V.add_(-h) → V",
    "Layer.step: -h → h",
    "Layer.step: V[0] = h if V and (not h) else where.where(h, V, 2.0) → (removed)",
    "Layer.step: 0 → 1 #2",
    "Layer.step: 0 → -1 #2",
    "Layer.step: h if V and (not h) else where.where(h, V, 2.0) → h if not (V and (not h)) else where.where(h, V, 2.0)",
    "Layer.step: V and (not h) → V or not h",
    "Layer.step: not h → h",
    "Layer.step: where.where(h, V, 2.0) → where.where(h, 2.0, V)",
    "Layer.step: 2.0 → 2.1",
    "Layer.step: return V.mT → return None",
    "Layer.step: V.mT → V",
}


def load_mutants() -> ModuleType:
    return load_program("mutation/mutants")


def test_every_kind_of_change():
    made = load_mutants().make_mutants("file.py", SOURCE)
    assert {mutant.name.removeprefix("file.py: ") for mutant in made} == CHANGES
    texts = {mutant.render() for mutant in made}
    assert len(texts) == len(CHANGES)
    for text in texts:
        compile(text, "file.py", "exec")
        assert "2 + 2" in text
        assert "{h - 1}" in text


def test_the_mutants_judged_equivalent_exist():
    """`benchmarks/mutation/mutations.py` would refuse the list only when `make verify` comes to it."""
    judged = tomllib.loads((ROOT / "benchmarks" / "mutation" / "equivalent_mutants.toml").read_text())
    package, find_unknown = ROOT / "src" / "shaped", load_mutants().find_unknown
    assert len(judged) > 10
    assert find_unknown(judged, package) == []
    gone = ["finite.py: propagate: 3 → 4", "gone.py: f: 0 → 1"]
    assert find_unknown([*judged, *gone], package) == gone
