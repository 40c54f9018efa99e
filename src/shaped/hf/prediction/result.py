"""Prediction: what `predict` returns."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from shaped.files import check_entries, open_regular, parse_json, write_atomically

QUANTITIES = ("rho", "length", "rank", "entropy")


@dataclass(frozen=True, eq=False)
class Prediction:
    """The residual stream before each block and after the last, and the attention of each block, for each sampled model."""

    rho: Float[Tensor, "stage sample"]
    """Mean correlation over pairs of tokens."""
    length: Float[Tensor, "stage sample"]
    """Root mean square of the tokens' entries."""
    rank: Float[Tensor, "stage sample"]
    """Effective rank of the tokens' covariance: from 1 to the number of tokens."""
    entropy: Float[Tensor, "layer sample"]
    """Of the softmax, in nats: mean over heads and queries."""
    info: dict[str, Any] = field(default_factory=dict)
    """Facts: name, sizes, seed, tokens."""

    def mean(self, quantity: str) -> tuple[Float[Tensor, " stage"], Float[Tensor, " stage"]]:
        """The mean over models of "rho", "length", "rank" or "entropy", and its standard error (nan for one sample)."""
        if quantity not in QUANTITIES:
            raise ValueError(f"quantity must be one of {', '.join(QUANTITIES)}, got {quantity!r}")
        values: Tensor = getattr(self, quantity)
        spread = values.std(1) if values.shape[1] > 1 else torch.full_like(values[:, 0], torch.nan)
        return values.mean(1), spread / values.shape[1] ** 0.5

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one .npz file: four arrays of float64, and `info` as JSON."""
        arrays = {name: getattr(self, name).cpu().numpy() for name in QUANTITIES}
        text = np.frombuffer(json.dumps(self.info, allow_nan=False).encode(), dtype=np.uint8)

        def write(file: IO[bytes]) -> None:
            np.savez(file, info=text, **arrays)

        write_atomically(Path(path), write)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Prediction:
        """Reads what `save` wrote."""
        try:
            with open_regular(Path(path)) as file, np.load(file, allow_pickle=False) as content:
                arrays = {name: np.asarray(content[name]) for name in (*QUANTITIES, "info")}
        except (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError) as error:
            said = " ".join(str(error).split())[:120]
            raise ValueError(f"path must be a file that Prediction.save wrote, got {path}: {said}") from None
        except Exception as error:  # zipfile and zlib have errors of their own
            raise ValueError(f"path must be a file that Prediction.save wrote, got {path}: {type(error).__name__}") from None
        text = arrays.pop("info").tobytes().decode(errors="replace")
        info = check_entries(str(path), parse_json(str(path), text), name=str)
        layers, samples = arrays["entropy"].shape if arrays["entropy"].ndim == 2 else (0, 0)
        for name, values in arrays.items():
            wanted = (layers + (name != "entropy"), samples)
            if values.dtype != np.float64 or values.shape != wanted or 0 in wanted:
                raise ValueError(f"path must have {name}, float64 of shape {list(wanted)}, got {values.dtype}, {list(values.shape)}")
        return cls(**{name: torch.from_numpy(values) for name, values in arrays.items()}, info=info)

    def __repr__(self) -> str:
        layers, samples = self.entropy.shape
        return f"Prediction({self.info.get('name')}, {layers} layers, {samples} samples, {self.info.get('tokens')} tokens)"
