"""Prediction: what `predict` returns."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from shaped.files import check_entries, open_regular, parse_json, write_atomically
from shaped.gradients import Gradients
from shaped.process import quote_error

QUANTITIES = ("rho", "length", "rank", "entropy")
GRADIENTS = "gradients."
"""With it start the names of the gradients' arrays in a file."""


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
    gradient_source: Callable[[], Gradients] | None = field(default=None, repr=False)
    """Draws the gradients. A prediction that was loaded has none."""

    @cached_property
    def gradients(self) -> Gradients:
        """Squared norms of the gradients of the loss, for as many models: with respect to the residual stream and to each matrix.

        The matrices are the model's own, as it is initialised: `weights["query"]` has the law of `grad.norm()**2`. The loss is the mean
        cross-entropy of labels that are drawn uniformly, one for each token (for ViT one for the class token).
        They are drawn at the first use, apart from the other quantities: they take longer.
        """
        if self.gradient_source is None:
            raise ValueError("gradients must be drawn before a prediction is saved: call predict again, got a file without them")
        return self.gradient_source()

    def mean(self, quantity: str) -> tuple[Float[Tensor, " stage"], Float[Tensor, " stage"]]:
        """The mean over models of "rho", "length", "rank" or "entropy", and its standard error (nan for one sample)."""
        if quantity not in QUANTITIES:
            raise ValueError(f"quantity must be one of {', '.join(QUANTITIES)}, got {quantity!r}")
        return find_mean(getattr(self, quantity))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one .npz file: four arrays of float64, `info` as JSON, and the gradients if they have been drawn."""
        arrays: dict[str, Any] = {name: getattr(self, name).cpu().numpy() for name in QUANTITIES} | {"info": pack(self.info)}
        if "gradients" in vars(self):
            arrays |= pack_gradients(self.gradients)

        def write(file: IO[bytes]) -> None:
            np.savez(file, **arrays)

        write_atomically(Path(path), write)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Prediction:
        """Reads what `save` wrote."""
        try:
            with open_regular(Path(path)) as file, np.load(file, allow_pickle=False) as content:
                arrays = {name: np.asarray(content[name]) for name in (*QUANTITIES, "info")}
                drawn = {name: np.asarray(content[name]) for name in content.files if name.startswith(GRADIENTS)}
        except (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError) as error:
            said = quote_error(error, 120)
            raise ValueError(f"path must be a file that Prediction.save wrote, got {path}: {said}") from None
        except Exception as error:  # zipfile and zlib have errors of their own
            raise ValueError(f"path must be a file that Prediction.save wrote, got {path}: {type(error).__name__}") from None
        info = unpack(path, arrays.pop("info"), name=str)
        layers, samples = arrays["entropy"].shape if arrays["entropy"].ndim == 2 else (0, 0)
        for name, values in arrays.items():
            check_array(name, values, (layers + (name != "entropy"), samples))
        quantities: dict[str, Any] = {name: torch.from_numpy(values) for name, values in arrays.items()}
        made = cls(**quantities, info=info)
        if drawn:
            vars(made)["gradients"] = unpack_gradients(path, drawn, layers, samples)
        return made

    def __repr__(self) -> str:
        layers, samples = self.entropy.shape
        return f"Prediction({self.info.get('name')}, {layers} layers, {samples} samples, {self.info.get('tokens')} tokens)"


def find_mean(values: Float[Tensor, "stage sample"]) -> tuple[Float[Tensor, " stage"], Float[Tensor, " stage"]]:
    """The mean over the samples, and its standard error (nan for one sample)."""
    spread = values.std(1) if values.shape[1] > 1 else torch.full_like(values[:, 0], torch.nan)
    return values.mean(1), spread / values.shape[1] ** 0.5


def pack(entries: dict[str, Any]) -> np.ndarray:
    """A dictionary as an array of bytes."""
    return np.frombuffer(json.dumps(entries, allow_nan=False).encode(), dtype=np.uint8)


def unpack(path: str | os.PathLike[str], text: np.ndarray, **kinds: Any) -> dict[str, Any]:
    return check_entries(str(path), parse_json(str(path), text.tobytes().decode(errors="replace")), **kinds)


def check_array(name: str, values: np.ndarray, wanted: tuple[int, ...]) -> None:
    if values.dtype != np.float64 or values.shape != wanted or 0 in wanted:
        raise ValueError(f"path must have {name}, float64 of shape {list(wanted)}, got {values.dtype}, {list(values.shape)}")


def pack_gradients(gradients: Gradients) -> dict[str, np.ndarray]:
    arrays = {"tokens": gradients.tokens, "loss": gradients.loss, "V": gradients.V}
    arrays |= {f"weights.{name}": values for name, values in gradients.weights.items()}
    about = pack({"entries": gradients.entries, "info": gradients.info})
    return {f"{GRADIENTS}{name}": values.numpy() for name, values in arrays.items()} | {f"{GRADIENTS}about": about}


def unpack_gradients(path: str | os.PathLike[str], arrays: dict[str, np.ndarray], layers: int, samples: int) -> Gradients:
    """Refuses arrays of other shapes than those that `save` wrote."""
    about = unpack(path, arrays.get(f"{GRADIENTS}about", np.zeros(0, np.uint8)), entries=dict, info=dict)
    entries, info = about["entries"], about["info"]
    n = info.get("n")
    if not all(type(value) is int and value > 0 for value in (n, *entries.values())):
        raise ValueError(f"path must have gradients of a model with whole numbers for n and entries, got {n!r} and {entries!r}")
    m = arrays.get(f"{GRADIENTS}V", np.zeros((0, 0))).shape[-1]
    shapes = {"tokens": (layers + 1, samples), "loss": (samples,), "V": (samples, m, m)}
    shapes |= {f"weights.{name}": (layers, samples) for name in entries}
    found = {}
    for name, shape in shapes.items():
        values = arrays.get(f"{GRADIENTS}{name}", np.zeros(0))
        check_array(f"{GRADIENTS}{name}", values, shape)
        found[name] = torch.from_numpy(values)
    return Gradients(
        torch.arange(layers + 1, dtype=torch.float64, device="cpu") / n,
        found["tokens"],
        {name: found[f"weights.{name}"] for name in entries},
        entries,
        found["loss"],
        found["V"],
        torch.full((samples,), torch.inf, dtype=torch.float64, device="cpu"),
        info,
    )
