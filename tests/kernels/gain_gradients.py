"""Gradients of a fused block's gains, each compared on its own with the reference in double precision on the same inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shaped.kernels import fused_block
from shaped.kernels.fused_block import Block, BlockFunction, Gains, Matrix
from shaped.kernels.long_attention import LongAttention
from shaped.kernels.short_attention import ShortAttention
from shaped.kernels.side_stream import SideStream
from shaped.testing.stats import Z, assert_mean

# Small ones among large ones: pooled with the others, a wrong gradient of gamma2 or slope would not show.
GAINS = Gains(lam_attention=0.9, gamma_attention=0.3, gamma1=0.7, gamma2=0.4, lam_feedforward=0.8, gamma_feedforward=0.5, slope=0.6)


@dataclass(frozen=True)
class Shape:
    batch: int
    m: int
    width: int
    heads: int
    kept: int | None = None  # tokens that leave the block; all of them if None
    qk_eps: float | None = None
    causal: bool = False  # with rotary positions: the kernels of long sequences


def find_relative_errors(shape: Shape, device: str, dtype: torch.dtype, learned: Gains[bool], generator: torch.Generator) -> Tensor:
    """(found - expected) / expected of each learned gain's gradient, in the order of `Gains`, for one draw of tokens and weights.

    The gradient of the output is the sum of the unit vectors along dy/dgain. So each gain's gradient is a sum of terms of mostly one sign,
    and rounding errors, which have random signs, are small against it.
    """

    def draw(*size: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(*size, generator=generator)).to(device, dtype)

    n, hidden = shape.width, 4 * shape.width
    sizes = {"qkv": (3 * n, n), "output": (n, n), "pre": (hidden, n), "post": (n, hidden)}
    weights = {name: draw(*size, std=size[1] ** -0.5) for name, size in sizes.items()}
    matrices = {name: Matrix(weight, torch.empty_like(weight)) for name, weight in weights.items()}
    exact_matrices = {name: Matrix(weight.double(), weight) for name, weight in weights.items()}
    settings = {"side_stream": SideStream(), "last": True}
    attention, exact_attention = make_attention(shape, device, torch.float32), make_attention(shape, device, torch.float64)
    block, exact_block = Block(**matrices, **settings, attention=attention), Block(**exact_matrices, **settings, attention=exact_attention)
    x, places = draw(shape.batch, shape.m, n), None
    if shape.kept is not None:
        places = torch.stack([torch.randperm(shape.m, generator=generator)[: shape.kept] for _ in range(shape.batch)]).to(device)
    pairs = [(value, bool(is_learned)) for value, is_learned in zip(GAINS, learned, strict=True) if value is not None]
    gains = [torch.tensor([value], device=device, requires_grad=is_learned) for value, is_learned in pairs]

    exact_gains = tuple(gain.detach().double() for gain in gains)
    jacobian = torch.func.jacfwd(lambda *values: fused_block.reference(x.double(), places, exact_block, *values), tuple(range(len(gains))))(
        *exact_gains
    )
    directions = torch.stack([direction.flatten() for direction in jacobian])
    dy = (directions / directions.norm(dim=1, keepdim=True)).sum(0).mul(n).to(dtype)
    expected = directions @ dy.double()

    y = BlockFunction.apply(x.requires_grad_(), places, block, *Gains(*gains))
    assert isinstance(y, Tensor)
    wanted = [gain for gain in gains if gain.requires_grad]
    found = torch.cat(torch.autograd.grad(y, wanted, dy.view_as(y))).double()
    expected = expected[torch.tensor([is_learned for _, is_learned in pairs], device=device)]
    return ((found - expected) / expected).cpu()


def make_attention(shape: Shape, device: str, dtype: torch.dtype) -> ShortAttention | LongAttention:
    D = shape.width // shape.heads
    settings = shape.heads, D**-0.5, shape.qk_eps
    if not shape.causal:
        return ShortAttention(*settings)
    angles = torch.arange(shape.m, device=device)[None, :, None] * 2.0 ** -torch.arange(D // 2, device=device, dtype=torch.float64)
    return LongAttention(*settings, shape.causal, (angles.cos().to(dtype), angles.sin().to(dtype)))


def check_errors(errors: Tensor, dtype: torch.dtype) -> None:
    """Errors, [draws, gains], are rounding errors: 5 standard errors and a bias of four roundings. One of 5 % or more is rejected."""
    bias = 4 * torch.finfo(dtype).eps / 2
    allowed = Z * errors.std(0) / len(errors) ** 0.5 + bias
    assert allowed.max() < 0.05, f"too few draws to see an error of 5 %: {allowed}"
    assert_mean(errors, 0.0, bias=bias)
