"""The hash of the code behind a page: it sees what computes, wherever that stands, and passes over what draws."""

import re
import shutil
from pathlib import Path

import pytest

from refusals import refused
from shaped.figures.harness import reproduce
from shaped.figures.harness.code_hash import ROOT, hash_code, list_sources

FIG1 = f"{reproduce.PAGES}.fig1"


def sources(id: str) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in list_sources(f"{reproduce.PAGES}.{id}")}


@pytest.fixture
def copy(tmp_path) -> Path:
    """The package in another place, to be changed there."""
    return Path(shutil.copytree(ROOT, tmp_path / "shaped", ignore=shutil.ignore_patterns("__pycache__")))


def edit(path: Path, pattern: str = r"\Z", replacement: str = "\n# a change\n") -> None:
    assert re.search(pattern, path.read_text()) is not None
    path.write_text(re.sub(pattern, replacement, path.read_text(), count=1))


def changes(copy: Path, module: str = FIG1) -> bool:
    hash_code.cache_clear()
    return hash_code(module, copy) != hash_code(module, ROOT)


def test_the_code_behind_each_page_is_all_that_computes_it():
    solver = {"limit.py", "finite.py", "stepping.py", "randomness.py", "covariance.py", "nn/functional.py"}
    rooms = {
        path.relative_to(ROOT).as_posix()
        for path in (*(ROOT / "layers").glob("*.py"), *(ROOT / "engine").glob("*.py"), *(ROOT / "nn/activations").glob("*.py"))
    }
    claims = {"compare.py", "figures/harness/claims.py", "figures/harness/simulator.py"}
    for id in reproduce.FIGURES:
        assert sources(id) >= solver | rooms | claims | {f"figures/pages/{id}.py"}, id
    trained = {"train/tables.py", "train/run_records.py", "train/run/metrics.py", "figures/shared/runs.py", "figures/harness/claims.py"}
    for id in reproduce.TRAINED:
        assert sources(id) >= trained | {f"figures/pages/{id}.py"}, id
    for id in (*reproduce.FIGURES, *reproduce.TRAINED):
        found = sources(id)
        others = {source for source in found if source.startswith("figures/pages/")} - {f"figures/pages/{id}.py"}
        assert not others, "one page's code is none of another's"
        assert not any(source == "figures/harness/style.py" or source.startswith("figures/harness/report/") for source in found), id


@pytest.mark.parametrize("name", ["limit.py", "layers/attention.py", "figures/shared/laws.py", "figures/harness/claims.py"])
def test_a_change_where_numbers_are_computed_changes_the_hash(copy, name):
    assert not changes(copy)
    edit(copy / name)
    assert changes(copy)


@pytest.mark.parametrize(
    "name",
    [
        *("figures/harness/style.py", "figures/harness/report/document.py", "figures/pages/fig2.py"),
        *("hf/models.py", "__init__.py", "advice/search.py"),
    ],
)
def test_a_change_elsewhere_does_not(copy, name):
    edit(copy / name)
    assert not changes(copy)


def test_how_a_page_is_drawn_and_described_does_not_count(copy):
    """A picture is drawn again on every run: its numbers stay valid. What `compute` calls does count."""
    page = copy / "figures" / "pages" / "fig1.py"
    for name in ("draw", "describe"):
        edit(page, rf"(def {name}\(.*\n)", r"\1    print('a change')\n")
    assert not changes(copy)
    edit(page, r"(def compute\(.*\n)", r"\1    print('a change')\n")
    assert changes(copy)


def test_what_shows_counts_where_compute_uses_it(copy):
    """Else stale numbers would stand beside new code: a page whose `compute` calls its `describe`, or takes from the style of pictures."""
    page = copy / "figures" / "pages" / "fig1.py"
    before = page.read_text()
    for use, change in (
        ("describe({}, {})", lambda: edit(page, r"(def describe\(.*\n)", r"\1    print('a change')\n")),
        ("from shaped.figures.harness.style import WIDE", lambda: edit(copy / "figures" / "harness" / "style.py")),
    ):
        page.write_text(before)
        edit(page, r"(def compute\(.*\n)", rf"\1    {use}\n")
        hash_code.cache_clear()
        used = hash_code(FIG1, copy)
        change()
        hash_code.cache_clear()
        assert hash_code(FIG1, copy) != used, use


def test_a_decorated_function_is_left_out_with_its_decorator(copy):
    page = copy / "figures" / "pages" / "fig1.py"
    edit(page, r"(?=def describe\()", "@staticmethod\n")
    assert not changes(copy)


def test_a_file_that_moves_is_still_seen(copy):
    """Into a folder that no one has listed, also where a function imports it late."""
    (copy / "figures" / "elsewhere").mkdir()
    (copy / "figures" / "elsewhere" / "__init__.py").write_text("")
    shutil.move(copy / "figures" / "shared" / "laws.py", copy / "figures" / "elsewhere" / "laws.py")
    page = copy / "figures" / "pages" / "fig1.py"
    edit(page, r"from shaped\.figures\.shared import laws\n", "")
    edit(page, r"(def settings\(.*\n)", r"\1    from shaped.figures.elsewhere import laws\n")
    assert copy / "figures" / "elsewhere" / "laws.py" in list_sources(FIG1, copy)
    hash_code.cache_clear()
    before = hash_code(FIG1, copy)
    edit(copy / "figures" / "elsewhere" / "laws.py")
    hash_code.cache_clear()
    assert hash_code(FIG1, copy) != before


def test_the_key_of_a_page_has_the_hash_and_no_module_is_an_error():
    keys = [reproduce.make_key(id, "quick", reproduce.Simulator())["code"] for id in reproduce.FIGURES]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch("[0-9a-f]{16}", key) for key in keys)
    for name in ("shaped.figures.pages.fig99", "numpy"):
        with refused("module", name):
            list_sources(name)
