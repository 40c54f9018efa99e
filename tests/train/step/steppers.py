"""A small model, its batches and its schedule for the tests of the step."""

from typing import Any

import numpy as np
import torch

from shaped.hf import ShapedConfig, ShapedForMaskedLM
from shaped.train.data.masking import MaskedBatches
from shaped.train.step.config import StepSchedule

CPU = torch.device("cpu")
SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}


def model(kind: Any = ShapedForMaskedLM, **config: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 12,
    }
    return kind(ShapedConfig(**sizes | {"gamma": 0.4, "recover_steps": 10} | config))


def batches() -> MaskedBatches:
    rows = np.random.default_rng(0).integers(5, 50, (40, 12))
    return MaskedBatches(rows, batch=8, seed=0, vocab=50, special=SPECIAL)


def make_schedule(of, lr: float = 1e-2, **how) -> StepSchedule:
    return StepSchedule(lambda step: lr, how.pop("factors", {}), of.config.shaping().share, **how)


def fail_to_compile(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError("this compiler knows nothing")
