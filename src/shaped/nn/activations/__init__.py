"""Activations. Each is one object, which random networks, the covariance SDE, trainable modules and configs share."""

from shaped.checks import quote
from shaped.nn.activations.base import C_MINUS as C_MINUS
from shaped.nn.activations.base import Activation as Activation
from shaped.nn.activations.base import Flow as Flow
from shaped.nn.activations.base import ShapedActivation as ShapedActivation
from shaped.nn.activations.gelu import ShapedGELU as ShapedGELU
from shaped.nn.activations.relu import LeakyReLU as LeakyReLU
from shaped.nn.activations.relu import ShapedReLU as ShapedReLU

ACTIVATIONS: dict[str, type[ShapedActivation]] = {kind.name: kind for kind in (ShapedReLU, ShapedGELU)}
"""By the names that configs and settings use."""


def check_activation(activation: object) -> None:
    if not isinstance(activation, ShapedActivation):
        raise ValueError(f"activation must be a shaped activation, such as ShapedReLU(c_minus=-1.0), got {quote(activation)}")
