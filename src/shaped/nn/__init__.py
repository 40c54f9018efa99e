"""Shaped layers in PyTorch."""

from shaped.nn import activations as activations
from shaped.nn import functional as functional
from shaped.nn.blocks import NormBlock as NormBlock
from shaped.nn.blocks import ShapedDecoder as ShapedDecoder
from shaped.nn.blocks import ShapedEncoder as ShapedEncoder
from shaped.nn.blocks import ShapedTransformerBlock as ShapedTransformerBlock
from shaped.nn.blocks import gains as gains
from shaped.nn.blocks import parameter_groups as parameter_groups
from shaped.nn.blocks import vanilla as vanilla
from shaped.nn.initialisations import reset_parameters as reset_parameters
from shaped.nn.modules import AttentionShaping as AttentionShaping
from shaped.nn.modules import ShapedFeedForwardBlock as ShapedFeedForwardBlock
from shaped.nn.modules import ShapedSelfAttention as ShapedSelfAttention
from shaped.nn.norms import DyT as DyT
from shaped.nn.norms import RMSNorm as RMSNorm
from shaped.nn.schedules import Fixed as Fixed
from shaped.nn.schedules import Learn as Learn
from shaped.nn.schedules import Recover as Recover
from shaped.nn.schedules import Schedule as Schedule
