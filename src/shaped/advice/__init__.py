"""Which gamma for a network of a given size? Its largest safe value at initialisation, with intervals."""

from shaped.advice.result import Advice as Advice
from shaped.advice.search import advise as advise
