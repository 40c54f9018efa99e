"""The programs of benchmarks/ as modules."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load_program(path: str) -> ModuleType:
    """A program by its path in benchmarks/, such as "studies/race"; it finds what lies beside it.

    `sys.path` stays as it was, whatever the program adds: in benchmarks/, train.py would hide the tests' package of that name.
    """
    program, before = BENCHMARKS / path, list(sys.path)
    sys.path.insert(0, str(program.parent))
    try:
        return import_module(program.name)
    finally:
        sys.path[:] = before
