"""Text that only attention can predict: each line is a list of random words, twice. For copying.toml.

python benchmarks/studies/copying.py out/copying.txt
"""

from __future__ import annotations

import random
import sys
from itertools import product
from pathlib import Path

WORDS = [start + vowel + end for start, vowel, end in product("bcdfgklm", "aeiou", "prstnvz")][:256]
LINES = 60_000


def make_line(generator: random.Random) -> str:
    words = generator.choices(WORDS, k=generator.randint(12, 30))
    return " ".join(words + words)


if __name__ == "__main__":
    generator = random.Random(0)
    place = Path(sys.argv[1])
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("\n\n".join(make_line(generator) for _ in range(LINES)) + "\n")
