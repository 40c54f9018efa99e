"""The processes of a run: one, or as many as `torchrun` has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from shaped.checks import whole_number


def is_first() -> bool:
    """Is this the process that logs and writes?"""
    return read_rank()[0] == 0


def read_rank() -> tuple[int, int]:
    """This process's number and how many there are, as `torchrun` says. Without WORLD_SIZE there is one process, and RANK is ignored."""
    world = _read_environment("WORLD_SIZE", 1, least=1)
    rank = _read_environment("RANK", 0, least=0) if world > 1 else 0
    if rank >= world:
        raise ValueError(f"RANK must be below WORLD_SIZE, {world}, got {rank}")
    return rank, world


def _read_environment(name: str, default: int, least: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return whole_number(name, int(text), least=least)
    except ValueError:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {text!r}") from None


@contextmanager
def join_processes(device: str) -> Iterator[tuple[int, int]]:
    """Joins the processes that `torchrun` started, for the duration. Yields this process's number and how many there are."""
    rank, world = read_rank()
    if world == 1:
        yield 0, 1
        return
    gpu = device != "cpu" and torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(_read_environment("LOCAL_RANK", rank, least=0))
    dist.init_process_group("nccl" if gpu else "gloo")
    try:
        yield dist.get_rank(), world
    finally:
        dist.destroy_process_group()


def average(tensor: Tensor) -> None:
    """Replaces a tensor by its mean over the processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def is_any(flag: bool, device: torch.device) -> bool:
    """Is the flag set in any process? All processes get the same answer, so that they act at the same step."""
    if dist.is_initialized():
        flags = torch.tensor(float(flag), device=device)
        dist.all_reduce(flags)
        flag = bool(flags > 0)
    return flag


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()
