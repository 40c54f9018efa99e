"""Checkpoints: tensors and a description with their hash, in a folder that appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from shaped.files import read_json, usual_mode

TENSORS, ABOUT = "state.safetensors", "state.json"


def save(folder: Path, step: int, state: dict[str, Tensor], about: dict[str, Any], keep: int) -> Path:
    """Writes folder/step-…; the last `keep` checkpoints stay."""
    from safetensors.torch import save_file

    final, unfinished = folder / f"step-{step:08d}", folder / f".step-{step:08d}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        with tensors_in(unfinished):
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, unfinished / TENSORS)
        described = {"step": step, "sha256": _hash(unfinished / TENSORS)} | about
        (unfinished / ABOUT).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        for name in (TENSORS, ABOUT):
            with open(unfinished / name, "rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)  # one that was damaged, or is made again
        os.replace(unfinished, final)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    later = [path for path in found(folder) if path > final]  # damaged, or of a future that will be made again
    for old in found(folder)[: -keep - len(later)] + later:
        shutil.rmtree(old)
    return final


@contextmanager
def tensors_in(folder: Path) -> Iterator[None]:
    """For what writes .safetensors there: these become readable like other files, and a full disk is an OSError that names the folder."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(f"tensors could not be written to {folder}: {error}") from None
    for path in folder.glob("*.safetensors"):
        usual_mode(path)


def found(folder: Path) -> list[Path]:
    """All checkpoints, the oldest first."""
    return sorted(folder.glob("step-*"))


def latest(folder: Path, say: Callable[[str], None], **kinds: Any) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint that is whole; those that are not are named and passed by. None if there is none at all.

    `kinds` are the types of what its description must have.
    """
    every = found(folder)
    for path in reversed(every):
        try:
            return read(path, **kinds)
        except ValueError as error:
            say(f"{error}: the one before it is used")
    if every:
        raise ValueError(f"checkpoints must have at least one that is whole, got none in {folder}: delete it to begin anew")
    return None


def read(path: Path, **kinds: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        about = read_json(path / ABOUT, step=int, sha256=str, **kinds)
        if about["step"] < 0:
            raise ValueError(f"{ABOUT} must have a step of at least 0, got {about['step']}")
        if _hash(path / TENSORS) != about["sha256"]:
            raise ValueError(f"{TENSORS} is not what was written")
        return load_file(path / TENSORS), about
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"checkpoint {path} is truncated or damaged ({error})") from None


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
