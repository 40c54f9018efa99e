"""The README's examples print what the README says."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_examples_print_what_is_shown():
    examples = re.findall(r"```python\n(.*?)```\n(?:\n```\n(.*?)```)?", README, re.DOTALL)
    code, shown = ("".join(parts) for parts in zip(*examples, strict=True))
    assert "propagate" in code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == shown


def test_every_option_in_the_readme_exists():
    helps = [
        subprocess.run([sys.executable, "-m", "shaped", command, "--help"], capture_output=True, text=True, check=True).stdout
        for command in ("simulate", "converge")
    ]
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", README)):
        assert option in "".join(helps)
