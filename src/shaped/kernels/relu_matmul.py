"""A product of matrices followed by the shaped ReLU, max(h, 0) + slope · min(h, 0), and its gradients: cuBLAS, then one kernel of ours.

`relu_matmul_hopper` has the same functions in one kernel each. This file runs on every GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shaped.kernels.gpu import launch
from shaped.kernels.residual import BLOCK, count_programs


def reference(x: Tensor, weight: Tensor, slope: Tensor) -> Tensor:
    """What `matmul_relu` computes, in plain PyTorch."""
    hidden = x @ weight.mT
    return hidden.clamp(min=0.0) + slope * hidden.clamp(max=0.0)


def matmul_relu(x: Tensor, weight: Tensor, slope: Tensor, keep_hidden: bool) -> tuple[Tensor, Tensor]:
    """relu(x W') and, with `keep_hidden`, x W'; without it the first tensor twice."""
    from shaped.kernels.gpu.relu_matmul import relu_kernel

    hidden = torch.mm(x, weight.t())
    # In place, the tensor is still in the cache for the next product and for the backward pass.
    activated = torch.empty_like(hidden) if keep_hidden else hidden
    launch(relu_kernel, count_programs(hidden), hidden, slope, activated, hidden.numel(), BLOCK, on=x, num_warps=8)
    return activated, hidden


def matmul_relu_backward(
    g: Tensor,
    weight: Tensor,
    hidden: Tensor,
    is_activated: bool,
    slope: Tensor,
    gamma: Tensor,
    gamma_terms: Tensor | None,
    slope_terms: Tensor | None,
) -> Tensor:
    """The gradient of `hidden` in y = gamma · relu(hidden) W', where g is the gradient of y.

    The terms of the gradients of gamma and slope go to `gamma_terms` and `slope_terms`, if these are given.
    `is_activated`: `hidden` holds the ReLU's output. That is enough if the slope is not negative and has no gradient.
    """
    from shaped.kernels.gpu.relu_matmul import relu_backward_kernel

    dhidden = torch.mm(g, weight)
    arguments = (dhidden, hidden, slope, gamma, dhidden, gamma_terms, slope_terms, hidden.numel(), BLOCK, is_activated)
    launch(relu_backward_kernel, count_programs(hidden), *arguments, on=g, num_warps=8)
    return dhidden
