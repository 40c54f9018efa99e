"""What the tokens of a model do at initialisation, from its config alone."""

from shaped.hf.prediction.result import Prediction as Prediction
from shaped.hf.prediction.simulation import predict as predict
