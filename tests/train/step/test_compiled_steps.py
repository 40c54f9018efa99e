"""Compiled steps and CUDA graphs: one program for all blocks, and a fallback that is logged."""

import functools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from shaped.train.data.masking import MaskedBatches
from shaped.train.step.config import StepConfig
from shaped.train.step.objectives.masked_lm import MaskedLoss
from shaped.train.step.stepper import Stepper
from train.step.steppers import CPU, SPECIAL, batches, fail_to_compile, make_schedule, model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the tracer looks at it for every input, also between blocks
@pytest.mark.parametrize("how", ["blocks", "whole"])
def test_all_blocks_share_one_compiled_program(how: str, monkeypatch: pytest.MonkeyPatch):
    """Traced without breaks, forward and backward; depth adds no programs when blocks are compiled one by one."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    data, graphs = batches(), []
    for depth in (2, 5):
        torch._dynamo.reset()
        counters.clear()
        made, eager = (model(num_hidden_layers=depth, schedule="recover") for _ in range(2))
        losses = Stepper(made, MaskedLoss, StepConfig(CPU, compile=how, half=True)).run(data.chunk(0, 4), make_schedule(made))
        assert losses == pytest.approx(
            Stepper(eager, MaskedLoss, StepConfig(CPU, half=True)).run(data.chunk(0, 4), make_schedule(eager)), rel=2**-7
        )
        graphs.append(counters["stats"]["unique_graphs"])
        assert not counters["graph_break"]
    assert graphs[0] == graphs[1]
    groups = 4  # matrices, head, embeddings, gains: Adam is compiled for each
    assert graphs[0] == groups + (4 if how == "blocks" else 1)  # embedding, blocks, the last of them, head


def test_what_cannot_be_compiled_is_launched_and_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=fail_to_compile))
    torch._dynamo.reset()
    made, eager, said = model(), model(), []
    losses = Stepper(made, MaskedLoss, StepConfig(CPU, compile="blocks"), said.append).run(batches().chunk(0, 4), make_schedule(made))
    assert losses == Stepper(eager, MaskedLoss, StepConfig(CPU)).run(batches().chunk(0, 4), make_schedule(eager))
    assert len(said) == 1
    assert "not compiled" in said[0]
    assert "this compiler knows nothing" in said[0]


def test_what_triton_cannot_compile_is_launched_and_said():
    """Fused blocks are not seen by PyTorch's compiler."""
    error = type("CompilationError", (Exception,), {"__module__": "triton.compiler.errors"})
    made, eager, said = model(), model(), []
    stepper = Stepper(made, MaskedLoss, StepConfig(CPU), said.append)

    def failing(*batch: torch.Tensor) -> torch.Tensor:
        raise error("no such instruction")

    stepper.loss = failing
    losses = stepper.run(batches().chunk(0, 4), make_schedule(made))
    assert losses == Stepper(eager, MaskedLoss, StepConfig(CPU)).run(batches().chunk(0, 4), make_schedule(eager))
    assert len(said) == 1
    assert "no such instruction" in said[0]


class NoStream:
    def __init__(self, priority: int = 0):
        pass

    def wait_stream(self, other: Any) -> None:
        pass


def test_what_cannot_be_a_graph_is_launched_and_said(monkeypatch: pytest.MonkeyPatch):
    """Without a GPU: the calls that a GPU would see are there and do nothing, but the capture, which fails."""
    for name, stand_in in {
        "Stream": NoStream,
        "current_stream": NoStream,
        "stream": lambda side: nullcontext(),
        "synchronize": lambda: None,
        "CUDAGraph": object,
        "graph": fail_to_compile,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    made, eager, said = model(), model(), []
    losses = Stepper(made, MaskedLoss, StepConfig(CPU, graph=True), said.append).run(batches().chunk(0, 8), make_schedule(made))
    assert losses == Stepper(eager, MaskedLoss, StepConfig(CPU)).run(batches().chunk(0, 8), make_schedule(eager))
    assert said == ["no CUDA graph, steps are launched one by one: this compiler knows nothing"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("block", "schedule"), [("shaped", "recover"), ("shaped", "learn"), ("preln", "fixed")])
def test_a_cuda_graph_steps_as_launches_do(block: str, schedule: str):
    """Compiled, in bfloat16, with and without a graph, against float32 on the CPU."""
    rows = np.random.default_rng(0).integers(5, 500, (256, 64))
    losses = {}
    for name, how in {
        "cpu": StepConfig(CPU, chunk=32),
        "launched": StepConfig(torch.device("cuda", 0), half=True, compile="blocks", chunk=32),
        "graph": StepConfig(torch.device("cuda", 0), half=True, compile="blocks", graph=True, chunk=32),
        "stream": StepConfig(torch.device("cuda", 0), half=True, compile="blocks", graph=True, stream=torch.bfloat16, chunk=32),
    }.items():
        sizes = {"hidden_size": 128, "num_attention_heads": 4, "vocab_size": 500, "max_position_embeddings": 64}
        made = model(block=block, schedule=schedule, **sizes)
        data = MaskedBatches(rows, batch=16, seed=0, vocab=500, special=SPECIAL, device=how.device)
        said: list[str] = []
        stepper = Stepper(made, MaskedLoss, how, said.append)
        losses[name] = stepper.run(data.chunk(0, 32), make_schedule(made, lr=1e-3))
        assert said == [], "no graph"
        assert stepper.step == 32
    assert losses["graph"] == pytest.approx(losses["launched"], rel=2**-8)
    assert losses["graph"] == pytest.approx(losses["cpu"], rel=2**-6)
    assert losses["stream"] == pytest.approx(losses["cpu"], rel=2**-6)
