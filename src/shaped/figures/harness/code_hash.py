"""A hash of the code that computes the numbers and claims of a page.

The code is found by following imports from the page's module, also those inside functions. A file that is moved or added is thus seen
without a list to keep up to date, and a change elsewhere leaves the page's cache valid. The package's own `__init__` imports everything:
of it only the names count that are used, `shaped.solve` and the like. The functions of a page that only show its numbers do not count, nor
does what they alone import: a picture is drawn again on every run.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

import shaped

ROOT = Path(shaped.__file__).parent
SHOWING = {"draw", "describe"}
"""Functions of a page's module that only show its numbers, unless others of its functions use them."""


@cache
def hash_code(module: str, root: Path = ROOT) -> str:
    """16 hexadecimal digits for all files in `list_sources`."""
    digest = hashlib.sha256()
    for path in list_sources(module, root):
        source = read_source(path, root)
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + source + b"\0")
    return digest.hexdigest()[:16]


def list_sources(module: str, root: Path = ROOT) -> list[Path]:
    """The file of a module of this package, and of all modules of this package that it imports, directly or not."""
    found: dict[str, Path] = {}
    exported = list_exports((root / "__init__.py").read_bytes())
    waiting = [module]
    while waiting:
        name = waiting.pop()
        name = exported.get(name, name)
        path = find_source(name, root)
        if path is None or name in found:
            continue
        found[name] = path
        waiting += list_imports(read_source(path, root))
    if not found:
        raise ValueError(f"module must be a module of {root}, got {module!r}")
    return sorted(found.values())


def read_source(path: Path, root: Path) -> bytes:
    """A file; of a page without the functions that only show its numbers."""
    source = path.read_bytes()
    if path.parent != root / "figures" / "pages":
        return source
    body = ast.parse(source).body
    showing = [node for node in body if isinstance(node, ast.FunctionDef) and node.name in SHOWING]
    used = {name.id for node in body if node not in showing for name in ast.walk(node) if isinstance(name, ast.Name)}
    if used & SHOWING:  # what computes calls what shows: then all of it counts
        return source
    lines = source.splitlines(keepends=True)
    for node in reversed(showing):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        del lines[first - 1 : node.end_lineno]
    return b"".join(lines)


def find_source(name: str, root: Path) -> Path | None:
    """The file of a module, or None where the name is no module inside this package: another package's, or a function in a module."""
    first, *rest = name.split(".")
    place = root.joinpath(*rest)
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if first == "shaped" and rest and path.is_file():
            return path
    return None


def list_exports(source: bytes) -> dict[str, str]:
    """The module behind every name of the package: shaped.solve to shaped.limit."""
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom) and node.module is not None]
    modules = [node for node in imports if node.module != "shaped"]  # `from shaped import nn` is a module already
    return {f"shaped.{alias.name}": str(node.module) for node in modules for alias in node.names}


@cache
def list_imports(source: bytes) -> tuple[str, ...]:
    """Every name that may be a module: for `from a.b import c`, both a.b and a.b.c; with `import shaped`, each `shaped.name` that is used.

    The package has no relative imports.
    """
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "shaped":
            names.append(f"shaped.{node.attr}")
    return tuple(names)
