"""The README's first example prints what the README says."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_first_example_prints_what_is_shown():
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL)
    assert found is not None
    code, shown = found.groups()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == shown


def test_every_option_in_the_readme_exists():
    done = subprocess.run([sys.executable, "-m", "shaped", "simulate", "--help"], capture_output=True, text=True, check=True)
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", README)):
        assert option in done.stdout
