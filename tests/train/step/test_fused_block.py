"""The fused blocks without a GPU."""

from pathlib import Path

from triton_interpreter import in_the_interpreter, needs_triton


@needs_triton
def test_fused_blocks_in_the_interpreter():
    in_the_interpreter(Path(__file__).with_name("interpreted.py"))
