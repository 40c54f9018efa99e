"""Activations of Transformers in use, as plain functions, by the names that layers take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional


def squared_relu(x: Tensor) -> Tensor:
    r"""$\max(x, 0)^2$ (So et al. 2021, "Primer")."""
    return torch.relu(x).square()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "tanh": torch.tanh,
    "relu2": squared_relu,
}
