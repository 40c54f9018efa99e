"""The helper for refusals accepts what it should and nothing else."""

import pytest

from refusals import refused


def test_the_helper_wants_every_word_on_one_line():
    def refuse(message: str) -> None:
        raise ValueError(message)

    with refused("n must", "3"):
        refuse("n must be at most 2, got 3")
    for message in ("n must be at most 2", "n must be at most 2,\ngot 3"):
        with pytest.raises(AssertionError), refused("n must", "3"):
            refuse(message)
