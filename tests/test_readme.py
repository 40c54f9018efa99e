"""The README's examples print what the README says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def examples(text: str) -> tuple[str, str]:
    """All Python examples of a page, in order, and what it says they print."""
    found = re.findall(r"```python\n(.*?)```\n(?:\n```\n(.*?)```)?", text, re.DOTALL)
    code, shown = ("".join(parts) for parts in zip(*found, strict=True))
    return code, shown


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_examples_print_what_is_shown():
    code, shown = examples(README)
    assert "propagate" in code
    assert "shaped_attention" in code
    assert run(code) == shown


@pytest.mark.parametrize(
    ("page", "word"), [("modules", "Recover"), ("huggingface", "ShapingCallback"), ("adding-a-layer", "ResidualLayer")]
)
def test_the_examples_of_a_page_print_what_is_shown(page, word):
    code, shown = examples((ROOT / "docs" / f"{page}.md").read_text())
    assert word in code
    assert run(code) == shown


def test_the_hugging_face_script_runs(tmp_path):
    out = tmp_path / "run"
    (tmp_path / "text").write_text("To be, or not to be, that is the question: " * 40)
    arguments = ["--text", str(tmp_path / "text"), "--steps", "4", "--out", str(out)]
    script = ROOT / "examples" / "huggingface.py"
    found = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=True)
    assert "'To be, or not to" in found.stdout
    assert json.loads((out / "config.json").read_text())["model_type"] == "gpt2"
    assert "shaped" not in (out / "config.json").read_text()


def test_every_option_in_the_readme_exists():
    helps = [
        subprocess.run([sys.executable, "-m", "shaped", *command.split(), "--help"], capture_output=True, text=True, check=True).stdout
        for command in ("simulate", "converge", "reproduce", "data prepare", "pretrain", "study", "glue")
    ]
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", README)):
        assert option in "".join(helps)
