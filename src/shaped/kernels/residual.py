"""Residual branches, lam · x + gamma · branch, and the gradients of gains, which are sums over all entries.

Each tensor is read and written once. Gradients of gains are deterministic: every program writes one term, and one launch adds the terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shaped.kernels.gpu import launch

BLOCK = 4096  # entries of a program


def reference(x: Tensor, branch: Tensor, lam: Tensor, gamma: Tensor | None) -> Tensor:
    """What `add_branch` computes, in plain PyTorch."""
    return lam * x + (branch if gamma is None else gamma * branch)


def add_branch(x: Tensor, branch: Tensor, lam: Tensor, gamma: Tensor | None) -> Tensor:
    """lam · x + gamma · branch. Without gamma: lam · x + branch."""
    from shaped.kernels.gpu.residual import residual_kernel

    out = torch.empty_like(x)
    launch(residual_kernel, count_programs(x), x, branch, lam, gamma, out, x.numel(), BLOCK, on=x, num_warps=8)
    return out


def add_branch_backward(g: Tensor, x: Tensor, lam: Tensor, gamma: Tensor | None, lam_terms: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the branch; without gamma the second is g itself. The terms of lam's gradient go to `lam_terms`."""
    from shaped.kernels.gpu.residual import residual_backward_kernel

    dx, dbranch = torch.empty_like(g), g if gamma is None else torch.empty_like(g)
    arguments = (g, x, lam, gamma, dx, dbranch, lam_terms, g.numel(), BLOCK)
    launch(residual_backward_kernel, count_programs(g), *arguments, on=g, num_warps=8)
    return dx, dbranch


def count_programs(x: Tensor) -> int:
    """Programs of a launch over the entries of x. Each writes one term of each gain's gradient."""
    return -(-x.numel() // BLOCK)


class GainTerms:
    """A row of terms for each entry of each gain, and the sums of the rows, which are the gains' gradients.

    Args:
        sources: four pairs, each the numbers of entries of the gains of one source, by name, and the number of terms of each entry.
    """

    def __init__(self, sources: Sequence[tuple[Mapping[str, int], int]], device: torch.device):
        entries = {name: size for gains, _ in sources for name, size in gains.items()}
        self._counts = [count for _, count in sources]
        self._ends = list(accumulate(sum(gains.values()) for gains, _ in sources))
        self.terms = torch.empty(self._ends[-1], max(self._counts), device=device)
        self.sums = self.terms.new_empty(self._ends[-1])
        sizes = list(entries.values())
        self.terms_of = dict(zip(entries, self.terms.split(sizes), strict=True))
        """By name, [entries, at least as many as there are terms]."""
        self.sum_of = dict(zip(entries, self.sums.split(sizes), strict=True))

    def add_up(self) -> None:
        """Writes `sums`: all rows in one launch."""
        from shaped.kernels.gpu.residual import sum_rows_kernel

        sizes = (self.terms.shape[1], *self._counts, *self._ends[:3], BLOCK)
        launch(sum_rows_kernel, len(self.sums), self.terms, self.sums, *sizes, on=self.sums, num_warps=8)
