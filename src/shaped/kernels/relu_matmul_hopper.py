"""`relu_matmul` for Hopper GPUs, in one kernel each way: the hidden features are written once, not twice.

cuBLAS has no ReLU with a slope. Tiles of 128 x 128 leave room for two programs on a multiprocessor: one multiplies while the other writes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shaped.kernels.availability import is_hopper
from shaped.kernels.gpu import launch

TILE = 128  # rows and columns of a tile
DEPTH = 64  # of the sum, what is multiplied at a time
GROUP = 8  # rows of tiles that share what they read


def fits(x: Tensor, weight: Tensor) -> bool:
    """Half precision on a Hopper GPU, where this was measured to be faster; rows aligned to 16 bytes, as tensor descriptors need."""
    return x.is_cuda and x.dtype.itemsize == 2 and all(size % 8 == 0 for size in weight.shape) and is_hopper(x.device.index)


def matmul_relu(x: Tensor, weight: Tensor, slope: Tensor, keep_hidden: bool) -> tuple[Tensor, Tensor]:
    """As `relu_matmul.matmul_relu`."""
    from shaped.kernels.gpu.relu_matmul_hopper import relu_matmul_kernel

    activated = x.new_empty(len(x), len(weight))
    hidden = torch.empty_like(activated) if keep_hidden else None
    half = (TILE, TILE // 2)
    count = min(count_programs(activated), 2 * count_multiprocessors(x.device))
    matrices = describe((x, (TILE, DEPTH)), (weight, (TILE, DEPTH)), (hidden, half), (activated, half))
    sizes = (*activated.shape, x.shape[1], TILE, DEPTH, GROUP, count)
    launch(relu_matmul_kernel, count, *matrices, slope, *sizes, on=x, num_warps=4, num_stages=3)
    return activated, activated if hidden is None else hidden


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
    """As `relu_matmul.matmul_relu_backward`."""
    from shaped.kernels.gpu.relu_matmul_hopper import relu_matmul_backward_kernel

    dhidden = torch.empty_like(hidden)
    matrices = describe((g, (TILE, DEPTH)), (weight, (DEPTH, TILE)), (hidden, (TILE, TILE)), (dhidden, (TILE, TILE)))
    arguments = (*matrices, slope, gamma, gamma_terms, slope_terms, *hidden.shape, g.shape[1], TILE, DEPTH, GROUP, is_activated)
    launch(relu_matmul_backward_kernel, count_programs(hidden), *arguments, on=g, num_warps=8, num_stages=3, maxnreg=128)
    return dhidden


def count_programs(x: Tensor) -> int:
    """Tiles of `hidden`; in the backward pass each is a program that writes one term of each gain's gradient."""
    return -(-x.shape[0] // TILE) * -(-x.shape[1] // TILE)


def describe(*tiled: tuple[Tensor | None, tuple[int, int]]) -> list[Any]:
    """Tensor descriptors of matrices and the shapes of their tiles; the hardware copies whole tiles with them."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return [None if x is None else TensorDescriptor.from_tensor(x, list(shape)) for x, shape in tiled]


def count_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
