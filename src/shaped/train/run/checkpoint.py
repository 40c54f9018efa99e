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

from shaped.files import read_json, remove, set_usual_mode, sha256, write_sealed

TENSORS, ABOUT = "state.safetensors", "state.json"


def save(folder: Path, step: int, state: dict[str, Tensor], about: dict[str, Any], keep: int) -> Path:
    """Writes folder/step-…; the last `keep` checkpoints stay."""
    from safetensors.torch import save_file

    final, unfinished = folder / f"step-{step:08d}", folder / f".step-{step:08d}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        with writing_tensors(unfinished):
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, unfinished / TENSORS)
        with open(unfinished / TENSORS, "rb") as file:
            os.fsync(file.fileno())
        write_sealed(unfinished / ABOUT, {"step": step, "sha256": sha256(unfinished / TENSORS)} | about)
        _make_room(final)
        os.replace(unfinished, final)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    later = [
        path for path in list_checkpoints(folder) if _parse_step(path) > step
    ]  # damaged, or from beyond the step that the run was resumed at
    for old in list_checkpoints(folder)[: -keep - len(later)] + later:
        remove(old)
    return final


def _make_room(path: Path) -> None:
    """Frees the name of a checkpoint: removes a folder, which is damaged or about to be replaced; moves anything else aside."""
    if path.is_dir():
        remove(path)
    elif path.is_symlink() or path.exists():
        path.rename(next(other for number in itertools.count(1) if not (other := path.with_name(f"{path.name}.other-{number}")).exists()))


@contextmanager
def writing_tensors(folder: Path) -> Iterator[None]:
    """Around code that writes .safetensors: they get the usual file mode, and a full disk is an OSError that names the folder."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(f"tensors could not be written to {folder}: {error}") from None
    for path in folder.glob("*.safetensors"):
        set_usual_mode(path)


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, the oldest first: folders named as `save` names them. Others are ignored."""
    ours = [path for path in folder.glob("step-*") if _parse_step(path) >= 0 and path.is_dir()]
    return sorted(ours, key=_parse_step)


def _parse_step(path: Path) -> int:
    """The step in a checkpoint's name; -1 if it is not the name of one."""
    digits = re.fullmatch(r"step-([0-9]{8,19})", path.name)
    step = int(digits[1]) if digits else -1
    return step if path.name == f"step-{step:08d}" else -1


def read_latest(folder: Path, log: Callable[[str], object], **kinds: Any) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint that is intact. Damaged ones are logged and skipped. None if there is no checkpoint.

    `kinds` are the types of the entries that its description must have.
    """
    for path in sorted(folder.glob("step-*")):
        if _parse_step(path) >= 0 and not path.is_dir():
            log(f"{path} is not a folder, so it is no checkpoint: left alone")
    every = list_checkpoints(folder)
    for path in reversed(every):
        try:
            return read(path, **kinds)
        except ValueError as error:
            log(f"{error}: the one before it is used")
    if every:
        raise ValueError(f"checkpoints must have at least one that is whole, got none in {folder}: delete it to begin anew")
    return None


def count_metrics(folder: Path) -> tuple[int, int]:
    """The step of the newest readable checkpoint and the number of metrics lines by then; zeros if none says it, as older ones."""
    for path in reversed(list_checkpoints(folder)):
        with suppress(OSError, ValueError):
            about = read_json(path / ABOUT, step=int, metrics=int)
            return about["step"], about["metrics"]
    return 0, 0


def read(path: Path, **kinds: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        about = read_json(path / ABOUT, step=int, sha256=str, **kinds)
        if about["step"] != _parse_step(path):
            raise ValueError(f"{ABOUT} must have the step {_parse_step(path)}, got {about['step']}")
        if sha256(path / TENSORS) != about["sha256"]:
            raise ValueError(f"{TENSORS} is not what was written")
        return load_file(path / TENSORS), about
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"checkpoint {path} is truncated or damaged ({error})") from None
