"""Is this model at risk? What a Transformer does to its tokens and gradients, measured in one forward and one backward pass."""

from shaped.diagnosis.diagnose import diagnose as diagnose
from shaped.diagnosis.observation import Observation as Observation
from shaped.diagnosis.observation import observe as observe
from shaped.diagnosis.result import Diagnosis as Diagnosis
