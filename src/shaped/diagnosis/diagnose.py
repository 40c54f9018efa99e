"""diagnose: measures a model, judges it, and says what its architecture does at initialisation."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from shaped.checks import whole_number
from shaped.diagnosis.bands import measure_bands
from shaped.diagnosis.memory import check_gradients
from shaped.diagnosis.observation import describe_batch, observe
from shaped.diagnosis.one_pass.losses import Loss
from shaped.diagnosis.remedies import try_remedies
from shaped.diagnosis.result import Diagnosis
from shaped.diagnosis.verdicts import judge
from shaped.nn.compiled import unwrap


def diagnose(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    seeds: int | None = None,
    seed: int = 0,
    remedies: bool = False,
    progress: bool | None = None,
) -> Diagnosis:
    """What a Transformer does to its tokens and gradients, layer by layer, and whether it is at risk.

    One forward and one backward pass, in evaluation mode. The model may be at initialisation or trained; it is left as it was.

    Args:
        model: any module whose attention is `scaled_dot_product_attention`, `shaped_attention` or a softmax of a product.
        batch: its arguments: a mapping of names, a tuple of positions, or one tensor. Tensors are moved to the model's device.
        loss: from the model's output and the batch to a number. By default the output's `loss`, the output itself if it is one number,
            or else a fixed random projection of the output.
        seeds: initialisations for the bands beside the curves; 0 for none. By default 8, and fewer where copies of a large model are made.
        seed: of the first of them.
        remedies: also try remedies for each verdict, in at most 12 more passes with the same batch and weights.
        progress: a progress bar for them after a second (None), at once (True) or never.
    """
    seeds = None if seeds is None else whole_number("seeds", seeds, least=0)
    seed = whole_number("seed", seed, least=0, most=math.inf)
    if isinstance(model, nn.Module):
        check_gradients(model)
    seen = observe(model, batch, loss)
    bands = measure_bands(model, batch, seen, loss=loss, seeds=seeds, seed=seed)
    info = {
        "model": type(unwrap(model)).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "batch": describe_batch(batch),
        "seeds": seeds,
        "seed": seed,
    }
    trials = try_remedies(model, batch, seen, loss=loss, progress=progress) if remedies else None
    return Diagnosis(seen, bands, judge(seen), info, trials)
