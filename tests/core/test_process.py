"""The command that installs an extra, from where the package came from."""

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shaped.process import suggest_install

CHECKOUT = "pip install '.[hf]' in a checkout of shaped"


@pytest.mark.parametrize(
    ("source", "command"),
    [
        ({"url": "file://{folder}", "dir_info": {}}, "pip install '{folder}[hf]'"),
        ({"url": "file://{folder}", "dir_info": {"editable": True}}, "pip install -e '{folder}[hf]'"),
        ({"url": "file://{folder}/gone", "dir_info": {}}, CHECKOUT),
        ({"url": "https://host/shaped", "vcs_info": {"vcs": "git"}}, "pip install 'shaped-transformer[hf] @ git+https://host/shaped'"),
        (None, CHECKOUT),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came_from(source: Any, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "a checkout"
    folder.mkdir()
    written = source and json.dumps(source).replace("{folder}", str(folder).replace(" ", "%20"))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: written))
    assert suggest_install("hf") == command.replace("{folder}", str(folder))


def test_without_metadata_it_is_installed_from_a_checkout(monkeypatch: pytest.MonkeyPatch):
    def find(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", find)
    assert suggest_install("hf") == CHECKOUT


def test_no_message_names_a_package_that_no_registry_has():
    sources = Path(__file__).parents[2] / "src" / "shaped"
    assert not [path for path in sources.rglob("*.py") if "pip install 'shaped" in path.read_text() and path.name != "process.py"]
