"""The processes of a run: one, or as many as `torchrun` has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from shaped.checks import whole_number


def is_first() -> bool:
    """Is this the process that speaks and writes?"""
    return place()[0] == 0


def place() -> tuple[int, int]:
    """This process's number and how many there are, as `torchrun` says. Without WORLD_SIZE it is alone, whatever RANK says."""
    world = _from_environment("WORLD_SIZE", 1, least=1)
    rank = _from_environment("RANK", 0, least=0) if world > 1 else 0
    if rank >= world:
        raise ValueError(f"RANK must be below WORLD_SIZE, {world}, got {rank}")
    return rank, world


def _from_environment(name: str, default: int, least: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return whole_number(name, int(text), least=least)
    except ValueError:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {text!r}") from None


@contextmanager
def processes(device: str) -> Iterator[tuple[int, int]]:
    """This process's number and how many there are; joined for the duration."""
    rank, world = place()
    if world == 1:
        yield 0, 1
        return
    gpu = device != "cpu" and torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(_from_environment("LOCAL_RANK", rank, least=0))
    dist.init_process_group("nccl" if gpu else "gloo")
    try:
        yield dist.get_rank(), world
    finally:
        dist.destroy_process_group()
