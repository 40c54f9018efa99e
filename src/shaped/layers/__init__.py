"""The layers of the theory, and the base classes for new ones (docs/adding-a-layer.md)."""

from shaped.layers.attention import ShapedAttention as ShapedAttention
from shaped.layers.base import Chain as Chain
from shaped.layers.base import Layer as Layer
from shaped.layers.base import NoLimit as NoLimit
from shaped.layers.base import ResidualLayer as ResidualLayer
from shaped.layers.base import Sizes as Sizes
from shaped.layers.feedforward import ReLUFeedForward as ReLUFeedForward
from shaped.layers.feedforward import ShapedFeedForward as ShapedFeedForward
from shaped.layers.feedforward import ShapedPerceptron as ShapedPerceptron
from shaped.layers.masks import alibi as alibi
from shaped.layers.normalisation import PostLN as PostLN
from shaped.layers.normalisation import PreLN as PreLN
from shaped.layers.terms import Term as Term
from shaped.layers.terms import WeightNoise as WeightNoise
