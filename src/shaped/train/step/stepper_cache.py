"""Compiled steps, kept for runs of the same shapes in one process."""

from __future__ import annotations

import math
from typing import Any

from shaped.train.step.config import StepConfig
from shaped.train.step.stepper import Log, Stepper


class StepperCache:
    """Steppers by what their programs depend on. A run that finds one compiles nothing."""

    def __init__(self) -> None:
        self._steppers: dict[Any, Stepper] = {}

    def get(self, model: Any, loss: Any, config: StepConfig, sizes: tuple[int, ...], log: Log) -> Stepper:
        """A stepper that trains this model, from its beginning: one of an earlier model with the same program, or a new one."""
        key = config, sizes, loss, _describe_program(model)
        if key in self._steppers:
            self._steppers[key].adopt(model)
        else:
            self._steppers[key] = Stepper(model, loss, config, log)
        return self._steppers[key]

    def clear(self) -> None:
        self._steppers.clear()


def _describe_program(model: Any) -> tuple[Any, ...]:
    """Of a model, what its program depends on. The values of gains and weights are data, not program."""
    config = model.config
    negative = config.c_minus < -math.sqrt(config.hidden_size)  # a negative slope needs other passes of a block
    kinds = (config.block, config.activation, config.schedule == "learn", config.train_gains, config.embedding_norm, negative)
    # With QK-norm the temperature is in the scale of the logits, a constant of the program; without, it is in the weights.
    normalised = (config.norm, config.qk_norm, config.qk_gain, config.qk_norm and config.tau0)
    tied = config.tie_word_embeddings and getattr(model, "head_scale", True)  # the scale is a constant of the program
    shape = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.intermediate_size, config.vocab_size)
    positions = (config.is_decoder, config.positions, config.rope_base, config.max_position_embeddings)
    return kinds, normalised, tied, shape, positions
