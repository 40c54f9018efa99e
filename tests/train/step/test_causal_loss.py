"""The causal loss: that of transformers on the same weights, with documents together or apart."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from shaped.hf import ShapedForCausalLM
from shaped.train.data.causal import CausalBatches
from shaped.train.step.config import StepConfig
from shaped.train.step.objectives.causal_lm import CausalLoss, select_inputs
from shaped.train.step.stepper import Stepper
from train.step.steppers import CPU, make_schedule, model

END = 3


def batches(borders: str = "ignore", batch: int = 8) -> CausalBatches:
    """Rows of 12 tokens, of which about one in six ends a document."""
    generator = np.random.default_rng(0)
    rows = generator.integers(5, 50, (40, 12))
    rows[generator.random(rows.shape) < 1 / 6] = END
    rows[:, 0] = 2
    return CausalBatches(rows, batch=batch, seed=0, end=END, borders=borders)


def first(batches: CausalBatches) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[0] for tensor in batches.chunk(0, 1))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("block", ["shaped", "preln", "postln", "vanilla"])
def test_the_loss_is_that_of_transformers(block: str, positions: str, tied: bool):
    made = model(ShapedForCausalLM, block=block, positions=positions, tie_word_embeddings=tied)
    batch = first(batches())
    expected = made(batch[0], labels=batch[0]).loss
    logits = made(batch[0]).logits
    assert expected.item() == ForCausalLMLoss(logits, batch[0], vocab_size=50).item()
    assert CausalLoss(made)(*batch).item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_respected_borders_are_documents_one_by_one(positions: str):
    """Each document alone has the same loss: no attention, no position and no label crosses its borders."""
    made = model(ShapedForCausalLM, positions=positions)
    ids, labels, count, places = first(batches("respect"))
    total, labelled = 0.0, 0
    for row in ids:
        for document in torch.tensor_split(row, (row[:-1] == END).nonzero().flatten() + 1):
            if len(document) > 1:
                total += made(document[None], labels=document[None]).loss.item() * (len(document) - 1)
                labelled += len(document) - 1
    assert count.item() == labelled
    found = CausalLoss(made)(ids, labels, count, places).item()
    assert found == pytest.approx(total / labelled, abs=1e-5)
    assert abs(CausalLoss(made)(*first(batches())).item() - found) > 1e-3
    observed = made(ids, **select_inputs((ids, labels, count, places)) | {"logits_to_keep": 0}).logits  # what diagnostics see
    assert ForCausalLMLoss(observed, None, 50, shift_labels=labels).item() == pytest.approx(found, abs=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_steps_are_those_of_torch_adam(tied: bool):
    """Ten steps of the flat Adam, with the head's gradient written in place if it is not tied."""
    made, reference = (model(ShapedForCausalLM, positions="rope", tie_word_embeddings=tied) for _ in range(2))
    data = batches()
    losses = Stepper(made, CausalLoss, StepConfig(CPU)).run(data.chunk(0, 10), make_schedule(made))
    adam = torch.optim.Adam(reference.parameters(), lr=1e-2)
    expected = []
    for step in range(10):
        (ids,) = data.chunk(step, 1)[0]
        loss = reference(ids, labels=ids).loss
        expected.append(loss.item())
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(("how", "borders"), [("blocks", "ignore"), ("blocks", "respect"), ("whole", "ignore")])
def test_compiled_and_in_bfloat16_it_is_nearly_the_same(how: str, borders: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    losses, said = [], []
    for config in ({}, {"compile": how, "half": True, "stream": torch.bfloat16}):
        options: dict[str, Any] = config
        made = model(ShapedForCausalLM, positions="rope", schedule="recover")
        stepper = Stepper(made, CausalLoss, StepConfig(CPU, **options), said.append)
        losses.append(stepper.run(batches(borders).chunk(0, 4), make_schedule(made, lr=3e-3)))
    assert losses[1] == pytest.approx(losses[0], rel=2**-6)
    assert losses[1] != losses[0]
    assert not said  # nothing fell back to eager code


def test_gains_that_are_not_trained_leave_the_table_to_autograd(monkeypatch: pytest.MonkeyPatch):
    """Rotary positions have no table, so that nothing else may be left that autograd could differentiate."""
    made = model(ShapedForCausalLM, positions="rope", train_gains=False)
    stepper = Stepper(made, CausalLoss, StepConfig(CPU))
    assert len(stepper.leaves) == 1
    losses = stepper.run(batches().chunk(0, 10), make_schedule(made))
    assert losses[-1] < losses[0]
