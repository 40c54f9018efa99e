"""`python docs/building/write_outputs.py PAGE.md …` runs the blocks of pages and writes what they print below them, to read and commit."""

from __future__ import annotations

import sys
from pathlib import Path

from pages import FENCE, enter_namespace, enter_temporary_folder, find_blocks, run_block


def rewrite(text: str) -> str:
    """The page with the outputs that its blocks have now. Blocks that are not run keep theirs."""
    blocks = iter(list(find_blocks(text)))
    with enter_temporary_folder(), enter_namespace("page") as module:

        def replace(found: object) -> str:
            block = next(blocks)
            whole = found[0]  # pyright: ignore[reportIndexIssue] (a match)
            if not block.runs:
                return whole
            printed, _ = run_block(block, module)
            if block.language == "console":
                return f"```console\n{printed}```\n"
            return f"```python\n{block.code}```\n" + (f"\n```\n{printed}```\n" if printed else "")

        return FENCE.sub(replace, text)


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        page.write_text(rewrite(page.read_text()))
