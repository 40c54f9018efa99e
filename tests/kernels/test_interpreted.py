"""The GPU kernels without a GPU."""

from pathlib import Path

import pytest

from triton_interpreter import in_the_interpreter, needs_triton


@needs_triton
@pytest.mark.parametrize("which", ["attention", "blocks"])
def test_kernels_in_the_interpreter(which: str):
    in_the_interpreter(Path(__file__).with_name("interpreted.py"), which)
