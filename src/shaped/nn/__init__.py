"""Networks with explicit weights, in PyTorch."""

from shaped.nn import functional as functional
