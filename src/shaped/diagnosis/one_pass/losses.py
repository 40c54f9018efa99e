"""What the backward pass starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shaped.diagnosis.one_pass.flow import iterate_values

Loss = Callable[[Any, Any], Tensor]
"""From the model's output and the batch to one number."""
SEED = 0  # of the random projection: it is the same in every diagnosis


def choose_loss(output: Any, batch: Any, loss: Loss | None) -> tuple[Tensor, str]:
    """One number to differentiate, and what it is, in words."""
    if loss is not None:
        value = loss(output, batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"loss must return a tensor with one number, got {got}")
        return value.reshape(()), "the loss that was given"
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.numel() == 1:
        return own.reshape(()), "the model's own loss"
    if isinstance(output, Tensor) and output.numel() == 1:
        return output.reshape(()), "the model's output, one number"
    x = next((value for value in iterate_values(output) if isinstance(value, Tensor) and value.is_floating_point()), None)
    if x is None:
        raise ValueError(f"model must return a floating-point tensor, or a loss must be given, got an output of {type(output).__name__}")
    return project(x), "a fixed random projection of the output, as the model has no loss"


def project(x: Tensor) -> Tensor:
    r"""$\sum_i r_i x_i / \sqrt{N}$ with standard normals r, the same ones for every model with this output's shape."""
    r = torch.randn(x.shape, generator=torch.Generator().manual_seed(SEED), device="cpu").to(x)
    return (r * x).sum() / x.numel() ** 0.5
