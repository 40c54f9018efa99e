"""The law of the gradients at initialisation: backpropagation through random networks, without their weights."""

from shaped.gradients.result import Gradients as Gradients
from shaped.gradients.simulation import backpropagate as backpropagate
