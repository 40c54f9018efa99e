"""The documents are true of the code: examples, options, links, names; and their lines are sentences."""

import ast
import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import shaped
from pages import find_blocks, run_page
from prose import find_long_lines, reflow
from shaped.commands.app import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+(?![a-z0-9-…])")


def test_most_blocks_are_run():
    """`make docs` runs them (docs/building/pages.py) and compares what they print; those that it leaves out say why."""
    blocks = [block for page in PAGES for block in find_blocks(page.read_text())]
    assert sum(block.runs for block in blocks) > 60
    assert sum(not block.runs for block in blocks) <= 4


PAGE = """# A page

```python
x = 2
print(x)
```

```
2
```

Not run when this page is built: it never ends.

```python
while True:
    pass
```

```python
print(x + 1)
```
"""


def test_a_page_that_shows_what_is_not_printed_is_noticed():
    assert [block.line for block in find_blocks(PAGE)] == [3, 14, 19]
    assert [block.runs for block in find_blocks(PAGE)] == [True, False, True]
    assert [(line, "prints\n3" in what) for line, what in run_page(PAGE).wrong] == [(19, True)]
    shown = PAGE + "\n```\n3\n```\n"
    assert run_page(shown).wrong == []
    assert run_page(shown).count == 2
    ((line, what),) = run_page(shown.replace("x = 2", "x = y")).wrong
    assert line == 3
    assert "NameError" in what


def test_the_hugging_face_script_runs(tmp_path, monkeypatch, capsys):
    """In this process, which has loaded what the script imports."""
    out = tmp_path / "run"
    (tmp_path / "text").write_text("To be, or not to be, that is the question: " * 40)
    arguments = ["--text", str(tmp_path / "text"), "--steps", "4", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["huggingface.py", *arguments])
    runpy.run_path(str(ROOT / "examples" / "huggingface.py"), run_name="__main__")
    assert "'To be, or not to" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["model_type"] == "gpt2"
    assert "shaped" not in (out / "config.json").read_text()


def list_options(group, path: str = "") -> dict[str, set[str]]:
    """The options of each command, by its name, such as "data prepare"."""
    found = {path: {"--help"}.union(*(one.opts + one.secondary_opts for one in group.params))}
    for name, command in getattr(group, "commands", {}).items():
        found |= list_options(command, f"{path} {name}".strip())
    return found


OPTIONS = list_options(typer.main.get_command(app))


def code_of(text: str) -> Iterator[str]:
    """Code spans, and lines of code."""
    for line in text.splitlines():
        yield from [line] if line.startswith("    ") else re.findall(r"`([^`]+)`", line)


def foreign_options(code: str) -> set[str]:
    """Options in a piece of code that are not of the command it shows; of any command, if it shows none."""
    words = re.sub(r".*?(torchrun .*-m |\b)shaped ", "shaped ", code).split("#")[0].split()
    own = words[:1] == ["shaped"]
    words = words[1:] if own else words
    name = next((" ".join(words[:count]) for count in (2, 1) if " ".join(words[:count]) in OPTIONS and words), "")
    if not own and not name and not code.startswith("--"):
        return set()  # another program
    known = OPTIONS[name] if name or own else set().union(*OPTIONS.values())
    return set(OPTION.findall(" ".join(words))) - known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_belongs_to_the_command_it_is_shown_with(page):
    assert {code: wrong for code in code_of(page.read_text()) if (wrong := foreign_options(code))} == {}


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("    shaped simulate --widths 4", {"--widths"}),
        ("shaped data prepare --text a --lr 1", {"--lr"}),
        ("reproduce --samples 3", {"--samples"}),
        ("torchrun --nproc-per-node 2 -m shaped pretrain --epochs 3", {"--epochs"}),
        ("shaped --scale paper", {"--scale"}),
        ("--faster", {"--faster"}),
        ("    shaped converge --widths 4", set()),
        ("shaped --install-completion", set()),
        ("--json", set()),
        ("pytest --cov", set()),
    ],
)
def test_an_option_of_another_command_is_noticed(code, wrong):
    assert foreign_options(code) == wrong


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file.read_text()), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_line_is_a_sentence(page):
    """`python tests/prose.py FILE.md` breaks the lines; long sentences are for the writer."""
    text = page.read_text()
    assert reflow(text) == text
    assert find_long_lines(text, 200) == []


def test_a_second_sentence_and_a_long_one_are_noticed():
    text = "- One sentence, e.g. this. Another one.\n\n    code. Not prose\n\n| a. Table |\n"
    assert reflow(text) == "- One sentence, e.g. this.\n  Another one.\n\n    code. Not prose\n\n| a. Table |\n"
    assert find_long_lines("short\n\n" + "word " * 41, 200) == ["word " * 41]


def test_a_piece_of_code_stays_on_its_line():
    text = "Then `. .venv/bin/activate`. Done.\n"
    assert reflow(text) == "Then `. .venv/bin/activate`.\nDone.\n"


FILE = re.compile(r"(?:[\w-]+/)*[\w-]+\.py|(?:[\w-]+/)+")


def lost_files(text: str) -> set[str]:
    """Python files and folders, in code spans and commands, that are neither in the repository nor in the package nor in the tests."""
    words = {word.partition("::")[0] for code in code_of(text) for word in code.split() if not code.startswith("      ")}
    places = (ROOT, ROOT / "src" / "shaped", ROOT / "tests")
    return {word for word in words if FILE.fullmatch(word) and not any((place / word).exists() for place in places)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_is_named_exists(page):
    assert lost_files(page.read_text()) - {"tensorboard/"} == set()  # a folder of a run


def test_a_file_that_moved_is_noticed():
    assert lost_files("`nn/activations.py`, `nn/activations/`, `tests/stats.py`, `testing/stats.py`\n\n    python benchmarks/adam.py") == {
        "nn/activations.py",
        "tests/stats.py",
        "benchmarks/adam.py",
    }


def test_the_layout_names_every_folder_and_only_files_that_are_there():
    """The block "Where things are" of CONTRIBUTING.md: folders or files, two spaces, what they are."""
    block = (ROOT / "CONTRIBUTING.md").read_text().split("    src/shaped/\n")[1].split("\n\n")[0]
    folders = set()
    for line in block.splitlines():
        where = ROOT / "src" / "shaped" if line.startswith("      ") else ROOT
        head, _, rest = line.strip().partition("  ")
        for name in head.split(", "):
            assert (where / name).exists(), name
        folder = where / head if head.endswith("/") else (where / head.split(", ")[0]).parent
        folders.add(folder)
        for name in re.findall(r"[\w/]+\.(?:py|toml)|\w+/(?=:)", rest):
            assert (folder / name).exists() or (ROOT / name).exists(), name
            folders.add((folder / name).parent if "." in name else folder / name)
    package = {file.parent for file in (ROOT / "src" / "shaped").rglob("*.py") if file.name != "__init__.py"}
    assert package <= folders, package - folders


def test_the_readme_is_short():
    assert len(README.split()) <= 900


def is_defined(name: str) -> bool:
    """Is this a module of the package, or what one defines? By its text: importing them all would take ten seconds."""
    path, parts = ROOT / "src" / "shaped", name.split(".")
    while parts and (path / parts[0]).is_dir():
        path = path / parts.pop(0)
    file = path / f"{parts.pop(0)}.py" if parts else path / "__init__.py"
    if not file.is_file():
        return False
    inside = ast.parse(file.read_text()).body
    for part in parts:
        found = [node for node in inside if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
        if not found:
            return False
        inside = found[0].body
    return True


def test_every_name_in_the_table_of_equations_exists():
    rows = [line.split(" | ") for line in (ROOT / "docs" / "equations.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for *_, functions, tests in rows:
        for name in re.findall(r"`([^`]+)`", functions):
            assert is_defined(name), name
        file = Path()
        for path, _, test in (id.partition("::") for id in re.findall(r"`([^`]+)`", tests)):
            file = ROOT / "tests" / path if path else file
            assert file.is_file(), file
            assert not test or f"def {test}(" in file.read_text(), test
    for name in ("covariance.gramm", "covariances.gram", "layers.base.ResidualLayer.advance", "figures.output"):
        assert not is_defined(name)


def test_the_citation_has_the_version():
    assert f"\nversion: {shaped.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert (ROOT / "src" / "shaped" / "py.typed").exists()
