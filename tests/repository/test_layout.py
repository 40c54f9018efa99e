"""The layout: small files that say what they are, small folders, and no cycle of imports."""

import ast
import re
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES, MODULES = 400, 14
Graph = dict[str, set[str]]


def list_files(root: Path) -> list[Path]:
    return [path for name in ("src", "tests", "benchmarks") for path in sorted((root / name).rglob("*.py"))]


def find_large(files: Iterable[Path]) -> list[str]:
    """Files with too many lines and folders with too many modules."""
    files = list(files)
    large = [f"{path}: {lines} lines" for path in files if (lines := len(path.read_text().splitlines())) > LINES]
    counts = {folder: sum(path.parent == folder for path in files) for folder in {path.parent for path in files}}
    return large + [f"{folder}: {count} modules" for folder, count in counts.items() if count > MODULES]


def read_imports(source: Path) -> Graph:
    """The modules of a source folder that each module imports, at its top or in a function."""
    paths = {".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path for path in source.rglob("*.py")}
    graph: Graph = {}
    for module, path in paths.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}:{node.lineno}: a relative import"
                found |= {name if (name := f"{node.module}.{alias.name}") in paths else str(node.module) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        graph[module] = found & paths.keys() - {module}
    return graph


def find_cycle(graph: Graph) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_files_and_folders_are_small():
    files = list_files(ROOT)
    assert len(files) > 200
    assert find_large(files) == []


def say_what_they_are_for(files: Iterable[Path]) -> list[Path]:
    """Files whose first line is a docstring of whole sentences: such lines are the map of a folder (CONTRIBUTING.md)."""
    return [path for path in files if re.match(r'r?"""\S.*[.?:)](\n|"""\n)', path.read_text(encoding="utf-8"))]


def test_the_first_line_of_a_file_says_what_it_is_for():
    files = [path for path in (*list_files(ROOT), *(ROOT / "docs").rglob("*.py"), *(ROOT / "examples").glob("*.py")) if path.stat().st_size]
    assert set(files) - set(say_what_they_are_for(files)) == set()


@pytest.mark.parametrize("text", ["import math\n", "# A file.\n", '"""\nA file.\n"""\n', '"""A file that\ngoes on."""\n', '"""A file"""\n'])
def test_a_file_that_does_not_say_it_is_noticed(tmp_path: Path, text: str):
    (tmp_path / "one.py").write_text('"""One file."""\n')
    (tmp_path / "other.py").write_text(text)
    assert say_what_they_are_for(sorted(tmp_path.iterdir())) == [tmp_path / "one.py"]


def test_names_of_test_files_are_unique():
    """The folders of tests are no packages, so that pytest stops at two files of one name when it collects them together."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_modules_import_each_other_without_cycles():
    graph = read_imports(ROOT / "src")
    assert len(graph) > 100
    assert "shaped.covariance" in graph["shaped.limit"]
    assert find_cycle(graph) == []


def test_a_long_file_and_a_full_folder_are_noticed(tmp_path: Path):
    folder = tmp_path / "src" / "room"
    folder.mkdir(parents=True)
    for number in range(MODULES):
        (folder / f"m{number}.py").write_text("x = 1\n" * LINES)
    assert find_large(list_files(tmp_path)) == []
    (folder / "m0.py").write_text("x = 1\n" * (LINES + 1))
    (folder / "more.py").touch()
    assert find_large(list_files(tmp_path)) == [f"{folder / 'm0.py'}: 401 lines", f"{folder}: 15 modules"]


@pytest.mark.parametrize(
    "line",
    [
        "import room.one",
        "from room import one",
        "from room.one import x",
        "def late():\n    from room import one",
        "from room.one import *",
    ],
)
def test_a_cycle_is_noticed(tmp_path: Path, line: str):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").touch()
    (tmp_path / "room" / "one.py").write_text("from room import two\nx = 1\n")
    (tmp_path / "room" / "two.py").write_text("import math\n")
    assert find_cycle(read_imports(tmp_path)) == []
    (tmp_path / "room" / "two.py").write_text(line + "\n")
    assert set(find_cycle(read_imports(tmp_path))) == {"room.one", "room.two"}
