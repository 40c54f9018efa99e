"""Shaped layers in PyTorch."""

from shaped.nn import functional as functional
from shaped.nn.modules import ShapedDecoder as ShapedDecoder
from shaped.nn.modules import ShapedEncoder as ShapedEncoder
from shaped.nn.modules import ShapedFeedForwardBlock as ShapedFeedForwardBlock
from shaped.nn.modules import ShapedSelfAttention as ShapedSelfAttention
from shaped.nn.modules import ShapedTransformerBlock as ShapedTransformerBlock
from shaped.nn.modules import gains as gains
from shaped.nn.schedules import Fixed as Fixed
from shaped.nn.schedules import Learn as Learn
from shaped.nn.schedules import Recover as Recover
from shaped.nn.schedules import Schedule as Schedule
