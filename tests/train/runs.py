"""Runs of tests, and what they leave."""

import multiprocessing
import os
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from safetensors.torch import load_file

import shaped
from shaped.train.run.loop import pretrain
from shaped.train.run.metrics import read_metrics
from shaped.train.run.result import Result
from shaped.train.run.settings import Settings


def quiet(settings: Settings, **how) -> Result:
    return pretrain(settings, log=lambda line: None, **how)


FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["shaped.train.run.loop"])


def start(settings: Settings, **environment: str) -> BaseProcess:
    """A run in a process of its own, forked from one that has loaded the library: a new interpreter would load it for seconds."""
    process = FORKSERVER.Process(target=_run, args=(settings, environment))
    process.start()
    return process


def wait_for(path: Path, process: BaseProcess) -> None:
    """Until the process has made it. A process that ends before fails the test: without it the test's own command would train for hours."""
    patience = time.monotonic() + 60
    while not path.exists():
        assert process.exitcode is None, f"it ended with status {process.exitcode} before {path.name} was there"
        assert time.monotonic() < patience, f"{path.name} is not there after a minute"
        time.sleep(0.01)


def _run(settings: Settings, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    quiet(settings)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def curve(folder: Path) -> list[dict]:
    """What was measured, without what depends on the machine."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


def command(settings: Settings) -> list[str]:
    config = settings.out.parent / "settings-of-the-command.toml"
    config.write_text(settings.to_toml())
    return ["-m", "shaped", "pretrain", "--config", str(config)]


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(shaped.__file__).parent.parent)}
