"""A hash of the code that computes the numbers and claims of a page.

The code is found by following imports from the page's module, also those inside functions. A file that is moved or added is thus seen
without a list to keep up to date, and a change elsewhere leaves the page's cache valid.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

import shaped

ROOT = Path(shaped.__file__).parent
DRAWING = {"shaped.figures.harness.style"}
"""Modules that only draw. A picture is drawn again on every run, so a change here needs no new numbers."""


@cache
def hash_code(module: str, root: Path = ROOT) -> str:
    """16 hexadecimal digits for all files in `list_sources`."""
    digest = hashlib.sha256()
    for path in list_sources(module, root):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def list_sources(module: str, root: Path = ROOT) -> list[Path]:
    """The file of a module of this package, and of all modules of this package that it imports, directly or not."""
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = find_source(name, root)
        if path is None or name in found or name in DRAWING:
            continue
        found[name] = path
        waiting += list_imports(path.read_bytes())
    if not found:
        raise ValueError(f"module must be a module of {root}, got {module!r}")
    return sorted(found.values())


def find_source(name: str, root: Path) -> Path | None:
    """The file of a module, or None where the name is no module of this package: another package's, or a function in a module."""
    first, *rest = name.split(".")
    place = root.joinpath(*rest)
    for path in (place.with_suffix(".py") if rest else place / "__init__.py", place / "__init__.py"):
        if first == "shaped" and path.is_file():
            return path
    return None


@cache
def list_imports(source: bytes) -> tuple[str, ...]:
    """Every name that may be a module: for `from a.b import c`, both a.b and a.b.c. The package has no relative imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(names)
