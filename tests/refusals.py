"""How wrong input is refused everywhere: a ValueError of one line that has the argument's name and what it got."""

import re

import pytest


def refused(*words: str):
    return pytest.raises(ValueError, match=r"(?s)\A(?!.*\n)" + "".join(f"(?=.*{re.escape(word)})" for word in words))
