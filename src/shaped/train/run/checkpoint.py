"""Checkpoints: tensors and a description with their hash, in a folder that appears whole or not at all."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from shaped.files import read_json, remove, sha256, usual_mode, write_sealed

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
        with open(unfinished / TENSORS, "rb") as file:
            os.fsync(file.fileno())
        write_sealed(unfinished / ABOUT, {"step": step, "sha256": sha256(unfinished / TENSORS)} | about)
        _make_room(final)
        os.replace(unfinished, final)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    later = [path for path in found(folder) if _step(path) > step]  # damaged, or of a future that will be made again
    for old in found(folder)[: -keep - len(later)] + later:
        remove(old)
    return final


def _make_room(path: Path) -> None:
    """For a checkpoint of this name: one that was damaged or is made again goes; what is no checkpoint is moved aside."""
    if path.is_dir():
        remove(path)
    elif path.is_symlink() or path.exists():
        path.rename(next(other for number in itertools.count(1) if not (other := path.with_name(f"{path.name}.other-{number}")).exists()))


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
    """All checkpoints, the oldest first: folders named as `save` names them. What else is there is not ours."""
    ours = [path for path in folder.glob("step-*") if _step(path) >= 0 and path.is_dir()]
    return sorted(ours, key=_step)


def _step(path: Path) -> int:
    """That a checkpoint's name says; -1 if it is not the name of one."""
    digits = re.fullmatch(r"step-([0-9]{8,19})", path.name)
    step = int(digits[1]) if digits else -1
    return step if path.name == f"step-{step:08d}" else -1


def latest(folder: Path, say: Callable[[str], None], **kinds: Any) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint that is whole; those that are not are named and passed by. None if there is none at all.

    `kinds` are the types of what its description must have.
    """
    for path in sorted(folder.glob("step-*")):
        if _step(path) >= 0 and not path.is_dir():
            say(f"{path} is not a folder, so it is no checkpoint: left alone")
    every = found(folder)
    for path in reversed(every):
        try:
            return read(path, **kinds)
        except ValueError as error:
            say(f"{error}: the one before it is used")
    if every:
        raise ValueError(f"checkpoints must have at least one that is whole, got none in {folder}: delete it to begin anew")
    return None


def metrics_by(folder: Path) -> tuple[int, int]:
    """The step of the newest checkpoint that can be described, and how many lines the metrics had by then; older ones do not say it."""
    for path in reversed(found(folder)):
        with suppress(OSError, ValueError):
            about = read_json(path / ABOUT, step=int, metrics=int)
            return about["step"], about["metrics"]
    return 0, 0


def read(path: Path, **kinds: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        about = read_json(path / ABOUT, step=int, sha256=str, **kinds)
        if about["step"] != _step(path):
            raise ValueError(f"{ABOUT} must have the step {_step(path)}, got {about['step']}")
        if sha256(path / TENSORS) != about["sha256"]:
            raise ValueError(f"{TENSORS} is not what was written")
        return load_file(path / TENSORS), about
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"checkpoint {path} is truncated or damaged ({error})") from None
