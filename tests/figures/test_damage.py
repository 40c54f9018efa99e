"""A damaged out folder: nothing escapes, and nothing damaged is shown as if it were whole."""

import numpy as np
from damaged_figures import IDS, Place
from tiny import plain_pictures


def test_no_random_damage_of_an_out_folder_goes_unnoticed(tmp_path, monkeypatch):
    """The first of the 1,000 that `python tests/figures/damaged_figures.py` makes, with plain pictures."""
    plain_pictures(monkeypatch.setattr, *IDS)
    place = Place(tmp_path, monkeypatch.setattr)
    outcomes = {}
    for number in range(12):
        what, outcomes[number] = place.try_damage(np.random.default_rng([0, number]))
        assert not outcomes[number].startswith("WRONG"), (number, what, outcomes[number])
    assert {"refused", "right", "right, and a word"} == set(outcomes.values())
