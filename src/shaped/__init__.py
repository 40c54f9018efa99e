"""The shaped Transformer: its infinite-depth-and-width limit and its finite networks, as one object each."""

from shaped import process

process.exit_on_interrupt()

if not process.is_page_server():  # it has to be there at once, and never needs torch: its workers do
    from shaped import nn as nn
    from shaped import workers as workers
    from shaped.advice import Advice as Advice
    from shaped.advice import advise as advise
    from shaped.compare import compare as compare
    from shaped.covariance import correlation as correlation
    from shaped.covariance import equicorrelated as equicorrelated
    from shaped.covariance import gram as gram
    from shaped.diagnosis import Diagnosis as Diagnosis
    from shaped.diagnosis import diagnose as diagnose
    from shaped.finite import propagate as propagate
    from shaped.gradients import Gradients as Gradients
    from shaped.gradients import backpropagate as backpropagate
    from shaped.layers import AttentionBranch as AttentionBranch
    from shaped.layers import Chain as Chain
    from shaped.layers import FeedForwardBranch as FeedForwardBranch
    from shaped.layers import Layer as Layer
    from shaped.layers import NoLimit as NoLimit
    from shaped.layers import Norm as Norm
    from shaped.layers import Normalise as Normalise
    from shaped.layers import PostLN as PostLN
    from shaped.layers import PreLN as PreLN
    from shaped.layers import ReLUFeedForward as ReLUFeedForward
    from shaped.layers import ResidualBlock as ResidualBlock
    from shaped.layers import ShapedAttention as ShapedAttention
    from shaped.layers import ShapedFeedForward as ShapedFeedForward
    from shaped.layers import ShapedPerceptron as ShapedPerceptron
    from shaped.layers import Weights as Weights
    from shaped.layers import alibi as alibi
    from shaped.layers import rope_frequencies as rope_frequencies
    from shaped.limit import solve as solve
    from shaped.nn.activations import ShapedGELU as ShapedGELU
    from shaped.nn.activations import ShapedReLU as ShapedReLU
    from shaped.stepping import StepEffect as StepEffect
    from shaped.stepping import StepWarning as StepWarning
    from shaped.trajectory import Trajectory as Trajectory
    from shaped.watching import Alarm as Alarm
    from shaped.watching import Watcher as Watcher
    from shaped.watching import watch as watch

__version__ = "0.1.0"
