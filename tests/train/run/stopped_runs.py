"""A run that was stopped half way."""

from dataclasses import replace

import pytest

from shaped.train.run import checkpoint
from shaped.train.run.settings import Settings
from shaped.train.run.stopping import Stopped
from train.runs import quiet


def stop_half_way(settings: Settings) -> Settings:
    """Runs 8 steps of 16. Returns the settings of the whole run."""
    settings = replace(settings, steps=16, checkpoint_every=4, evaluate_every=4, keep=2)
    for _ in range(2):
        with pytest.raises(Stopped):
            quiet(replace(settings, minutes=0.0))
    assert [path.name for path in checkpoint.list_checkpoints(settings.out / "checkpoints")] == ["step-00000004", "step-00000008"]
    return settings
