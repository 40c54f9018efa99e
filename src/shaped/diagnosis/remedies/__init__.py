"""Remedies that are tried on a model and measured: changes of what it calls, and which one is tried for which verdict."""

from shaped.diagnosis.remedies.trials import Trial as Trial
from shaped.diagnosis.remedies.trials import Trials as Trials
from shaped.diagnosis.remedies.trials import try_remedies as try_remedies
