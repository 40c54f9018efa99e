"""Kernels without a GPU: Triton's interpreter, which must be enabled before Triton is imported."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which exists for Linux only")


def in_the_interpreter(script: Path, *arguments: str) -> None:
    """Runs a script of checks in a process of its own. The last line that it prints must be "all near"."""
    import triton

    if int(triton.__version__.split(".")[1]) < 7 and triton.__version__.startswith("3."):
        pytest.skip("needs Triton 3.7 or later: the interpreters before it fail with NumPy 2.4")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = subprocess.run([sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, check=False)
    assert found.stdout.endswith("all near\n"), found.stderr[-2000:]
