"""Scripts in cells (`# %%`) as pages: their text, their code, what each cell prints and the pictures that it writes."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from pages import enter_namespace, enter_temporary_folder, run_code


@dataclass(frozen=True)
class Cell:
    text: str
    """Markdown; empty for a cell of code."""
    code: str


def read_cells(script: str) -> list[Cell]:
    """`# %% [markdown]` begins a cell of text, whose lines are comments, `# %%` one of code."""
    cells = []
    for part in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if head.strip() == "[markdown]":
            cells.append(Cell("\n".join(line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()), ""))
        else:
            cells.append(Cell("", body.strip() + "\n"))
    return cells


def make_page(script: Path, pictures: Path, page_folder: Path, run: bool = True) -> str:
    """Runs the script cell by cell, and copies its pictures to a folder, to which the page refers."""
    pictures.mkdir(parents=True, exist_ok=True)
    parts = []
    with enter_temporary_folder() as folder, enter_namespace("cells") as module:
        seen = set[Path]()
        for cell in read_cells(script.read_text()):
            if cell.text:
                parts.append(cell.text)
                continue
            printed = run_code(cell.code, module, script.name) if run else ""
            parts.append(f"```python\n{cell.code}```")
            parts += [f"```\n{printed}```"] if printed else []
            new = sorted(set(folder.glob("out/*.png")) - seen, key=os.path.getmtime)
            seen.update(new)
            for picture in new:
                shutil.copy(picture, pictures / picture.name)
                parts.append(f"![{picture.stem.replace('-', ' ')}]({os.path.relpath(pictures / picture.name, page_folder)})")
    return "\n\n".join(parts) + "\n"
