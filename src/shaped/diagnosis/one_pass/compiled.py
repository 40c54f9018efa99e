"""What torch.compile hides: switches it off for a while, for any number of users that end in any order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_stance = ExitStack()
_users = 0


@contextmanager
def run_uncompiled() -> Iterator[None]:
    """Compiled functions and modules run uncompiled until the last user ends. Loads no compiler where none is used."""
    global _users
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        yield
        return
    if not _users:
        _stance.enter_context(torch.compiler.set_stance("force_eager"))
    _users += 1
    try:
        yield
    finally:
        _users -= 1
        if not _users:
            _stance.close()
