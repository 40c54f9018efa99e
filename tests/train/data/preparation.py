"""The options of the tests' preparations, and a limit of their memory."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from train.conftest import LENGTH

HOW: dict[str, Any] = {"vocab": 80, "length": LENGTH, "valid_share": 0.1, "progress": False}
HOW_ELSE: dict[str, Any] = HOW | {"length": 16}


@contextmanager
def no_more_memory_than(size: int) -> Iterator[None]:
    """That Python asks for at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()
