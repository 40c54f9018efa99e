"""The written block without a GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which is made for Linux alone")
def test_the_written_block_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted.py"))], env=environment, capture_output=True, text=True, check=False
    )
    assert found.stdout.endswith("all near\n"), found.stderr[-2000:]
