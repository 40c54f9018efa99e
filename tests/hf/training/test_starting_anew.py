"""Trainer with a model that was trained before."""

import warnings

import pytest
from test_trainer import model_of, trainer_of

from shaped.hf import ShapingCallback
from shaped.nn import Fixed, Recover


@pytest.mark.parametrize("schedule", [Recover(15), Fixed()])
def test_a_schedule_that_starts_anew_on_a_recovered_model_warns(schedule, tmp_path):
    """Its shaping comes back, and with it another function."""
    model = model_of("recover")
    Recover(15).apply(model, 15)
    trainer = trainer_of(model, tmp_path, [ShapingCallback(schedule)], steps=1)
    with pytest.warns(UserWarning, match=r"gains of 0 is set to 1: .* leave ShapingCallback out"):
        trainer.train()


@pytest.mark.parametrize("kind", ["fixed", "learn", "recover"])
def test_a_fresh_model_and_a_resumed_run_do_not(kind, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for steps, resume in ((10, None), (12, str(tmp_path / "checkpoint-10"))):
            model = model_of(kind)
            trainer_of(model, tmp_path, [ShapingCallback(model.config.shaping())], steps=steps).train(resume_from_checkpoint=resume)
