"""The blocks of a model in the training step on a GPU: `kernels.fused_block` where it can be used, a fallback where it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from shaped.kernels.fused_block import Block, BlockFunction, Gains, Matrix
from shaped.kernels.long_attention import LongAttention
from shaped.kernels.short_attention import ShortAttention
from shaped.kernels.side_stream import SideStream
from shaped.nn.activations import ShapedReLU
from shaped.nn.blocks import ShapedTransformerBlock
from shaped.nn.modules import ShapedSelfAttention
from shaped.nn.rotary import Rotation
from shaped.train.step.direct_gradients import DirectLinear


class FusedBlock:
    """A block as a function of its tokens.

    Args:
        block: one of those for which `can_fuse` is True.
        fallback: called where the kernels do not fit: with a mask of documents or padding, dropout, other precisions.
        side_stream: the same for all blocks.
        last: is its backward pass the last one?
    """

    def __init__(self, block: Any, fallback: Any, side_stream: SideStream, last: bool):
        self.block, self.fallback, self.side_stream, self.last = block, fallback, side_stream, last

    def __call__(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        attend: None = None,
        places: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Arguments as in `ShapedTransformerBlock.forward`."""
        block, attention, feedforward = self.block, self.block.attention, self.block.feedforward
        mixing = None if mask is not None or x.dtype != attention.output.weight.dtype else choose_attention(attention, x, rotation)
        if mixing is None:
            return self.fallback(x, mask, attend, places, rotation)
        gamma1, gamma2 = attention.shaping()
        gains = Gains(
            lam_attention=block.lam_attention,
            gamma_attention=block.gamma_attention,
            gamma1=gamma1,
            gamma2=gamma2,
            lam_feedforward=block.lam_feedforward,
            gamma_feedforward=block.gamma_feedforward,
            slope=feedforward.slope,
            query=None if attention.qk_gains is None else attention.qk_gains.query,
            key=None if attention.qk_gains is None else attention.qk_gains.key,
        )
        tensors = Block(
            qkv=Matrix(attention.qkv.weight, attention.qkv.gradient),
            output=Matrix(attention.output.weight, attention.output.gradient),
            pre=Matrix(feedforward.pre.weight, feedforward.pre.gradient),
            post=Matrix(feedforward.post.weight, feedforward.post.gradient),
            attention=mixing,
            side_stream=self.side_stream,
            last=self.last,
        )
        return BlockFunction.apply(x, places, tensors, *gains)


def choose_attention(attention: ShapedSelfAttention, x: Tensor, rotation: Rotation | None) -> ShortAttention | LongAttention | None:
    """The fastest kernels for the attention of these tokens; None if there are none."""
    settings = attention.heads, attention.scale, attention.qk_eps
    if rotation is None and attention.fits_short_kernel(x):
        return ShortAttention(*settings)
    return LongAttention(*settings, attention.is_causal, rotation) if attention.fits_long_kernel(x) else None


def can_fuse(blocks: Sequence[nn.Module]) -> bool:
    """Can all of them be fused, and has each gains of its own?

    Autograd would add up the gradients of a shared gain before the side stream has computed them.
    """
    if not all(isinstance(block, ShapedTransformerBlock) and _can_fuse_one(block) for block in blocks):
        return False
    trained = [id(gain) for block in blocks for _, gain in block.named_parameters(remove_duplicate=False) if gain.ndim < 2]
    return len(set(trained)) == len(trained)


def _can_fuse_one(block: ShapedTransformerBlock) -> bool:
    """Shaped attention with one product for q, k and v, the shaped ReLU, weights whose gradients are written in place."""
    attention, feedforward = block.attention, block.feedforward
    matrices = (attention.qkv, attention.output, feedforward.pre, feedforward.post)
    # The shaped ReLU is the one activation that the kernels are written for. An unshaped one has no slope.
    if not isinstance(feedforward.activation, ShapedReLU) or feedforward.slope is None or attention.shaping is None:
        return False
    if not all(isinstance(matrix, DirectLinear) for matrix in matrices):
        return False
    learned = {gain.requires_grad for gain in (*attention.shaping.scalars(), feedforward.slope)}
    # Without a learned slope the backward pass reads the sign of the ReLU's input from its output, which a negative slope would hide.
    return learned == {True} or (learned == {False} and feedforward.start >= 0.0)
