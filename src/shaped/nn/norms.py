"""Norms of the usual Transformer blocks, and DyT, which replaces them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shaped.checks import SINGLE, positive
from shaped.nn.functional import RMS_EPS, rms_norm

DYT_ALPHA = 0.5
Features = Float[Tensor, "*batch width"]


class RMSNorm(nn.RMSNorm):
    """`rms_norm` with a trained gain. PyTorch's own class warns of tokens that have another dtype than the gain."""

    def __init__(self, width: int):
        super().__init__(width, eps=RMS_EPS)

    def forward(self, x: Features) -> Features:
        return rms_norm(x, RMS_EPS) * self.weight


class DyT(nn.Module):
    r"""$\gamma\circ\tanh(\alpha x) + \beta$ (Zhu et al. 2025, "Transformers without Normalization", Eq. 1).

    $\alpha$ is a trained scalar that starts at `alpha`. The gain $\gamma$ (`weight`) starts at 1, the bias $\beta$ at 0.
    """

    def __init__(self, width: int, alpha: float = DYT_ALPHA):
        super().__init__()
        self.start = positive("alpha", alpha, SINGLE)
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight, self.bias = (nn.Parameter(torch.empty(width)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets alpha, gain and bias to their initial values."""
        nn.init.constant_(self.alpha, self.start)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Features) -> Features:
        return self.weight * torch.tanh(self.alpha * x) + self.bias


MakeNorm = Callable[[int], nn.Module]


@dataclass(frozen=True)
class NormKind:
    about: str
    """A few words for the commands' help."""
    make: MakeNorm
    """Called with the width."""


NORMS = {"layer": NormKind("LayerNorm", nn.LayerNorm), "rms": NormKind("RMSNorm, without mean and bias", RMSNorm)}
