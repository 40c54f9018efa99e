"""What torch.compile hides: the model that it wraps, and what it calls. Off for a while, for any number of users that end in any order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

_stance = ExitStack()
_users = 0


def unwrap(model: nn.Module) -> nn.Module:
    """The model within what `torch.compile(model)` returned; any other as it is."""
    return getattr(model, "_orig_mod", model)


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
