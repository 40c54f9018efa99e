"""What a figure has computed, on disk: arrays in an .npz, everything else in a .json that is written last and seals it."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shaped.figures.lab import Result
from shaped.files import write_atomically, write_json


@dataclass(frozen=True)
class Saved:
    summary: dict[str, Any]
    arrays: dict[str, np.ndarray]


def save(folder: Path, id: str, key: dict[str, Any], result: Result, seconds: float) -> Saved:
    """Writes the arrays, then the summary with their hash: a run that is interrupted between the two has saved nothing."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **result.arrays)
    data = buffer.getvalue()
    summary = key | {
        "seconds": seconds,
        "claims": result.claims,
        "table": result.table,
        "arrays_sha256": hashlib.sha256(data).hexdigest(),
    }
    write_atomically(folder / f"{id}.npz", lambda file: file.write(data))
    write_json(folder / f"{id}.json", summary)
    return Saved(json.loads(json.dumps(summary)), result.arrays)


def load(folder: Path, id: str, key: dict[str, Any]) -> Saved | None:
    """What was saved under this key; None where nothing was, the key is another one, or a file is damaged."""
    try:
        summary = json.loads((folder / f"{id}.json").read_bytes())
        if any(summary[name] != value for name, value in json.loads(json.dumps(key)).items()):
            return None
        if not {"claims", "seconds"} <= summary.keys():
            return None
        data = (folder / f"{id}.npz").read_bytes()
        if hashlib.sha256(data).hexdigest() != summary["arrays_sha256"]:
            return None
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return Saved(summary, dict(arrays))
    except (OSError, ValueError, KeyError, TypeError):  # json's and unicode's errors are ValueErrors
        return None
