"""The layers of the theory, and the base classes for new ones (docs/adding-a-layer.md)."""

from shaped.layers.attention import ShapedAttention as ShapedAttention
from shaped.layers.attention_branch import AttentionBranch as AttentionBranch
from shaped.layers.base import Chain as Chain
from shaped.layers.base import Layer as Layer
from shaped.layers.base import NoLimit as NoLimit
from shaped.layers.base import ResidualLayer as ResidualLayer
from shaped.layers.base import Sizes as Sizes
from shaped.layers.blocks import ResidualBlock as ResidualBlock
from shaped.layers.branches import Branch as Branch
from shaped.layers.branches import FeedForwardBranch as FeedForwardBranch
from shaped.layers.branches import Weights as Weights
from shaped.layers.feedforward import ReLUFeedForward as ReLUFeedForward
from shaped.layers.feedforward import ShapedFeedForward as ShapedFeedForward
from shaped.layers.feedforward import ShapedPerceptron as ShapedPerceptron
from shaped.layers.masks import alibi as alibi
from shaped.layers.normalisation import Norm as Norm
from shaped.layers.normalisation import Normalise as Normalise
from shaped.layers.normalisation import PostLN as PostLN
from shaped.layers.normalisation import PreLN as PreLN
from shaped.layers.rope import rope_frequencies as rope_frequencies
from shaped.layers.terms import Term as Term
from shaped.layers.terms import WeightNoise as WeightNoise
