"""The step: the Hugging Face model's loss, PyTorch's Adam, one program for all blocks, the same in bfloat16 and after a restart."""

import copy
import functools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from refusals import refused
from shaped.hf import ShapedConfig, ShapedForMaskedLM, ShapedForSequenceClassification
from shaped.train.data.masking import MaskedBatches
from shaped.train.step.attention_backends import BACKENDS, CHOICES, attention_backend
from shaped.train.step.config import StepConfig, StepSchedule
from shaped.train.step.flat_parameters import classify_parameters
from shaped.train.step.objectives.classification import ClassifierLoss
from shaped.train.step.objectives.masked_lm import MaskedLoss
from shaped.train.step.optimisers import OPTIMISERS, Optimiser
from shaped.train.step.stepper import Stepper
from shaped.train.step.stepper_cache import StepperCache

CPU = torch.device("cpu")
SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
BLOCKS = [("shaped", "fixed"), ("shaped", "learn"), ("shaped", "recover"), ("preln", "fixed"), ("postln", "fixed"), ("vanilla", "fixed")]


def model(kind: Any = ShapedForMaskedLM, **config: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 12,
    }
    return kind(ShapedConfig(**sizes | {"gamma": 0.4, "recover_steps": 10} | config))


def batches() -> MaskedBatches:
    rows = np.random.default_rng(0).integers(5, 50, (40, 12))
    return MaskedBatches(rows, batch=8, seed=0, vocab=50, special=SPECIAL)


def plan(of, lr: float = 1e-2, **how) -> StepSchedule:
    return StepSchedule(lambda step: lr, how.pop("factors", {}), of.config.shaping().share, **how)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("block", "schedule"), BLOCKS)
def test_the_loss_is_that_of_the_hugging_face_model(block: str, schedule: str, tied: bool):
    made = model(block=block, schedule=schedule, tie_word_embeddings=tied)
    ids, places, labels = (tensor[0] for tensor in batches().chunk(0, 1))
    everywhere = torch.full_like(ids, -100).scatter(-1, places, labels)
    expected = made(ids, labels=everywhere).loss
    assert MaskedLoss(made)(ids, places, labels).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("block", ["shaped", "preln"])
def test_the_classifiers_loss_is_that_of_the_hugging_face_model(block: str):
    made = model(ShapedForSequenceClassification, block=block, num_labels=2)
    ids = torch.randint(5, 50, (4, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(12) < torch.tensor([[12], [5], [9], [2]])
    labels = torch.tensor([0, 1, 1, 0])
    expected = made(ids, attention_mask=mask.long(), labels=labels).loss
    assert ClassifierLoss(made)(ids, mask, labels).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("schedule", ["learn", "recover"])
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_steps_are_those_of_torch_adam(schedule: str, clip: float):
    """20 steps of the flat Adam against torch.optim.Adam on the Hugging Face model, gains at a learning rate of their own."""
    made, reference = model(schedule=schedule).double(), model(schedule=schedule).double()
    reference.load_state_dict(made.state_dict())
    data = batches()
    stepper = Stepper(made.float(), MaskedLoss, StepConfig(CPU, clips=clip > 0))
    losses = stepper.run(data.chunk(0, 16), plan(made, clip=clip, factors={"gains": 3.0, "shaping": 2.0}))
    losses += stepper.run(data.chunk(16, 4), plan(made, clip=clip, factors={"gains": 3.0, "shaping": 2.0}))
    reference.float()
    of = classify_parameters(reference)
    rates = {"gains": 3e-2, "shaping": 2e-2}
    groups = [{"params": [p], "lr": rates.get(of[name], 1e-2)} for name, p in reference.named_parameters()]
    adam = torch.optim.Adam(groups, betas=(0.9, 0.999))
    expected = []
    for step in range(20):
        reference.config.shaping().apply(reference, step)
        ids, places, labels = (tensor[0] for tensor in data.chunk(step, 1))
        loss = reference(ids, labels=torch.full_like(ids, -100).scatter(-1, places, labels)).loss
        expected.append(loss.item())
        adam.zero_grad()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
        adam.step()
    assert losses == pytest.approx(expected, rel=2e-4)
    for name, value in stepper.values().items():
        assert (value - reference.get_parameter(name)).abs().max() < 2e-3, name
    assert stepper.step == 20


def test_every_parameter_has_its_kind():
    made = model(block="preln", embedding_norm=True)
    of = classify_parameters(made)
    assert of.keys() == dict(made.named_parameters()).keys()
    assert of["head.weight"] == "head"
    assert of["model.embedding.positions.weight"] == "embeddings"
    assert of["model.layers.0.block.norm_attention.weight"] == of["model.norm.bias"] == "vectors"
    assert of["model.layers.2.block.feedforward.post.weight"] == "matrices"
    shaped_ = classify_parameters(model(schedule="learn"))
    assert [sum(kind == wanted for kind in shaped_.values()) for wanted in ("gains", "shaping")] == [3 * 4, 3 * 3]
    tied = classify_parameters(model(tie_word_embeddings=True))
    assert "head" not in tied.values()


def test_the_model_is_a_view_of_what_is_trained():
    made = model(schedule="recover")
    stepper = Stepper(made, MaskedLoss, StepConfig(CPU))
    before = made.head.weight.clone()
    stepper.run(batches().chunk(0, 4), plan(made))
    assert not torch.equal(made.head.weight, before)
    shaping = made.model.layers[1].block.attention.shaping
    assert shaping.gamma1.item() == pytest.approx(0.7)  # of the last step, which was the fourth of ten
    stepper.set_share(made.config.shaping().share(10))
    assert shaping.gamma1.item() == made.model.layers[2].block.feedforward.slope.item() == 0.0


def test_bfloat16_follows_float32():
    """Weights in float32 are what Adam moves; the passes see them rounded. Losses differ by roundings of 2^-8."""
    data, losses = batches(), []
    for half in (False, True):
        made = model(schedule="learn")
        stepper = Stepper(made, MaskedLoss, StepConfig(CPU, half=half))
        losses.append(stepper.run(data.chunk(0, 16), plan(made)))
        assert all(p.dtype == torch.float32 for p in made.parameters())
    assert losses[1] == pytest.approx(losses[0], rel=2**-7)
    assert losses[1] != losses[0]
    assert losses[0][-1] < losses[0][0] - 0.1
    twin = dict(stepper.twin.named_parameters())
    assert twin["model.layers.0.block.attention.qkv.weight"].dtype == torch.bfloat16
    assert twin["model.layers.0.block.gamma_attention"].dtype == torch.float32
    values = stepper.values()
    attention = "model.layers.0.block.attention"
    values[f"{attention}.qkv.weight"] = torch.cat([values[f"{attention}.{part}.weight"] for part in ("query", "key", "value")])
    for name in twin.keys() & values.keys():
        assert torch.equal(twin[name], values[name].to(twin[name].dtype))
    assert len(twin.keys() & values.keys()) > len(twin) - 3


def test_a_stepper_taken_over_by_another_run_is_as_new():
    data, one, other = batches(), model(), model(gamma=0.2)
    with torch.no_grad():
        other.head.weight.mul_(2)
    alone = Stepper(model(gamma=0.2), MaskedLoss, StepConfig(CPU))
    with torch.no_grad():
        alone.model.get_parameter("head.weight").mul_(2)
    expected = alone.run(data.chunk(0, 8), plan(other))
    stepper = Stepper(one, MaskedLoss, StepConfig(CPU))
    stepper.run(data.chunk(0, 16), plan(one))
    stepper.adopt(other)
    assert stepper.run(data.chunk(0, 8), plan(other)) == expected


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
        losses = Stepper(made, MaskedLoss, StepConfig(CPU, compile=how, half=True)).run(data.chunk(0, 4), plan(made))
        assert losses == pytest.approx(Stepper(eager, MaskedLoss, StepConfig(CPU, half=True)).run(data.chunk(0, 4), plan(eager)), rel=2**-7)
        graphs.append(counters["stats"]["unique_graphs"])
        assert not counters["graph_break"]
    assert graphs[0] == graphs[1]
    groups = 4  # matrices, head, embeddings, gains: Adam is compiled for each
    assert graphs[0] == groups + (4 if how == "blocks" else 1)  # embedding, blocks, the last of them, head


def broken(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError("this compiler knows nothing")


def test_what_cannot_be_compiled_is_launched_and_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    torch._dynamo.reset()
    made, eager, said = model(), model(), []
    losses = Stepper(made, MaskedLoss, StepConfig(CPU, compile="blocks"), said.append).run(batches().chunk(0, 4), plan(made))
    assert losses == Stepper(eager, MaskedLoss, StepConfig(CPU)).run(batches().chunk(0, 4), plan(eager))
    assert len(said) == 1
    assert "not compiled" in said[0]
    assert "this compiler knows nothing" in said[0]


def test_what_triton_cannot_compile_is_launched_and_said():
    """Written blocks are not seen by PyTorch's compiler."""
    error = type("CompilationError", (Exception,), {"__module__": "triton.compiler.errors"})
    made, eager, said = model(), model(), []
    stepper = Stepper(made, MaskedLoss, StepConfig(CPU), said.append)

    def failing(*batch: torch.Tensor) -> torch.Tensor:
        raise error("no such instruction")

    stepper.loss = failing
    losses = stepper.run(batches().chunk(0, 4), plan(made))
    assert losses == Stepper(eager, MaskedLoss, StepConfig(CPU)).run(batches().chunk(0, 4), plan(eager))
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
        "graph": broken,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    made, eager, said = model(), model(), []
    losses = Stepper(made, MaskedLoss, StepConfig(CPU, graph=True), said.append).run(batches().chunk(0, 8), plan(made))
    assert losses == Stepper(eager, MaskedLoss, StepConfig(CPU)).run(batches().chunk(0, 8), plan(eager))
    assert said == ["no CUDA graph, steps are launched one by one: this compiler knows nothing"]


GRADIENTS = {
    "one product": {"schedule": "learn"},
    "three products": {"schedule": "learn", "hidden_size": 12},  # 12 x 12 entries do not follow each other in memory without gaps
    "tied": {"tie_word_embeddings": True},
    "gains not trained": {"train_gains": False},
    "preln": {"block": "preln"},
}


def agree(found: dict[str, torch.Tensor], reference: torch.nn.Module, loss: torch.Tensor) -> None:
    parameters = dict(reference.named_parameters())
    assert found.keys() == parameters.keys()
    for name, gradient in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True):
        assert (found[name] - gradient).abs().max() < 1e-6 * max(1.0, float(gradient.abs().max())), name


@pytest.mark.parametrize("config", GRADIENTS.values(), ids=GRADIENTS.keys())
def test_gradients_written_in_place_are_those_of_autograd(config: dict[str, Any]):
    made = model(**config)
    reference = copy.deepcopy(made)
    stepper = Stepper(made, MaskedLoss, StepConfig(CPU))
    twin: Any = stepper.twin
    assert (twin.model.layers[0].block.attention.qkv is None) == (config.get("hidden_size") == 12)
    chunk = batches().chunk(0, 1)
    stepper.run(chunk, plan(made))
    agree(stepper.gradients(), reference, MaskedLoss(reference)(*(tensor[0] for tensor in chunk)))


def test_gradients_of_a_classifier_and_of_weights_used_twice():
    """What is used in two places gets the sum of both, which autograd makes."""
    made = model(ShapedForSequenceClassification, num_labels=2)
    made.model.layers[1].block.feedforward = made.model.layers[0].block.feedforward
    made.model.layers[2].block.attention.output.weight = made.model.layers[0].block.attention.output.weight
    reference = copy.deepcopy(made)
    stepper = Stepper(made, ClassifierLoss, StepConfig(CPU))
    ids = torch.randint(5, 50, (4, 12), generator=torch.Generator().manual_seed(1))
    batch = ids, torch.arange(12) < torch.tensor([[12], [5], [9], [2]]), torch.tensor([0, 1, 1, 0])
    agree(stepper.gradients_of(batch), reference, ClassifierLoss(reference)(*batch))


def test_frozen_parameters_are_refused():
    made = model()
    made.head.weight.requires_grad_(False)
    with refused("model", "head.weight", "frozen"):
        Stepper(made, MaskedLoss, StepConfig(CPU))


@pytest.mark.parametrize("block", ["shaped", "preln", "postln"])
def test_a_stream_in_bfloat16_follows_float32(block: str):
    losses = []
    for stream in (torch.float32, torch.bfloat16):
        made = model(block=block)
        stepper, seen = Stepper(made, MaskedLoss, StepConfig(CPU, half=True, stream=stream)), []

        def look(module: Any, given: Any, tokens: Any, seen: list[torch.dtype] = seen) -> None:
            seen.extend([given[0].dtype, tokens.dtype])

        for layer in stepper.twin.get_submodule("model.layers").children():
            layer.get_submodule("block").register_forward_hook(look)
        losses.append(stepper.run(batches().chunk(0, 16), plan(made, lr=3e-3)))
        assert set(seen) == {stream}
    assert losses[1] == pytest.approx(losses[0], rel=2**-6)
    assert losses[1] != losses[0]


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
        losses[name] = stepper.run(data.chunk(0, 32), plan(made, lr=1e-3))
        assert said == [], "no graph"
        assert stepper.step == 32
    assert losses["graph"] == pytest.approx(losses["launched"], rel=2**-8)
    assert losses["graph"] == pytest.approx(losses["cpu"], rel=2**-6)
    assert losses["stream"] == pytest.approx(losses["cpu"], rel=2**-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("schedule", ["recover", "learn"])
def test_gradients_of_written_blocks_are_those_of_autograd(schedule: str, graph: bool):
    """Against float32: a gradient that is not written, or a stream that nobody waited for, would show here."""
    device = torch.device("cuda", 0)
    made = model(schedule=schedule, hidden_size=128, num_attention_heads=4, vocab_size=500, max_position_embeddings=64)
    exact = copy.deepcopy(made).to(device)
    how = StepConfig(device, half=True, compile="blocks", graph=graph, stream=torch.bfloat16, chunk=8)
    rows = np.random.default_rng(0).integers(5, 500, (256, 64))
    compare_gradients(made, exact, how, MaskedBatches(rows, batch=16, seed=0, vocab=500, special=SPECIAL, device=device))


@pytest.mark.parametrize("schedule", ["recover", "learn"])
def test_gradients_of_modules_are_those_of_autograd(schedule: str):
    """What the test above does, where there is no GPU and no written block."""
    made = model(schedule=schedule)
    compare_gradients(made, copy.deepcopy(made), StepConfig(CPU, half=True, stream=torch.bfloat16), batches())


def compare_gradients(made: Any, exact: Any, how: StepConfig, data: MaskedBatches) -> None:
    stepper = Stepper(made, MaskedLoss, how)
    if how.compile == "blocks":
        written: Any = stepper.loss
        for block in written._run["blocks"]:
            block.fallback = None  # nothing but the fused kernels
    for step in range(8):
        with torch.no_grad():
            for name, value in stepper.values().items():
                exact.get_parameter(name).copy_(value)
        exact.config.shaping().apply(exact, step)
        batch = data.chunk(step, 1)
        ids, places, labels = (part[0] for part in batch)
        loss = exact(ids, labels=torch.full_like(ids, -100).scatter(-1, places, labels)).loss
        names = [name for name, _ in exact.named_parameters()]
        expected = together(dict(zip(names, torch.autograd.grad(loss, list(exact.parameters())), strict=True)))
        for group in stepper.groups:
            group.gradients.zero_()  # of the step before
        stepper.run(batch, plan(made, lr=1e-3))
        found = together(stepper.gradients())
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() <= 0.1 * gradient.norm(), (step, name)  # bfloat16 leaves a few per cent of small models


def together(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of the gains as one: each alone may be a small sum of large terms, of which bfloat16 leaves little."""
    gains = [gradients[name].float() for name in sorted(gradients) if gradients[name].numel() == 1]
    return {name: gradient.float().clone() for name, gradient in gradients.items() if gradient.numel() > 1} | {"gains": torch.cat(gains)}


@pytest.mark.parametrize("choice", CHOICES)
def test_the_attention_kernels_flags_are_set_and_restored(choice: str):
    """Flags of the process; a device that is named need not be there."""

    def flags() -> dict[str, bool]:
        return {name: getattr(torch.backends.cuda, f"{flag}_enabled")() for name, flag in BACKENDS.items()}

    before = flags()
    torch.backends.cuda.enable_flash_sdp(False)  # as its user may have left it
    try:
        with attention_backend(choice, torch.device("cuda")):
            assert flags() == {name: choice in ("auto", name) for name in BACKENDS}
            assert torch.backends.cuda.math_sdp_enabled()
        assert flags() == before | {"flash": False}
        with attention_backend(choice, CPU):
            assert flags() == before | {"flash": False}
    finally:
        torch.backends.cuda.enable_flash_sdp(before["flash"])


def test_steppers_that_are_made_leave_the_attention_kernels_flags(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "enable_flash_sdp", broken)
    Stepper(model(), MaskedLoss, StepConfig(CPU, attention="math"))


def test_the_backward_pass_has_the_attention_kernels_flags_too(monkeypatch: pytest.MonkeyPatch):
    """Else a forward pass with flash attention has a backward pass of cuDNN."""
    seen: dict[str, bool] = {}

    class Recorded(MaskedLoss):
        def forward(self, ids: torch.Tensor, places: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = super().forward(ids, places, labels)
            loss.register_hook(lambda _: seen.update(backward=torch.backends.cuda.cudnn_sdp_enabled()))
            seen["forward"] = torch.backends.cuda.cudnn_sdp_enabled()
            return loss

    stepper = Stepper(model(), Recorded, StepConfig(CPU, attention="flash"))
    monkeypatch.setattr(stepper, "attention_backend", lambda: attention_backend("flash", torch.device("cuda")))
    assert torch.backends.cuda.cudnn_sdp_enabled()
    stepper.gradients_of(tuple(tensor[0] for tensor in batches().chunk(0, 1)))
    assert seen == {"forward": False, "backward": False}
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_the_cache_shares_a_stepper_between_models_of_one_program():
    cache, config, said = StepperCache(), StepConfig(CPU), []
    first = cache.get(model(), MaskedLoss, config, (12, 2, 8), said.append)
    assert cache.get(model(gamma=0.2), MaskedLoss, config, (12, 2, 8), said.append) is first
    others = [
        cache.get(model(), MaskedLoss, config, (12, 3, 8), said.append),
        cache.get(model(), MaskedLoss, StepConfig(CPU, clips=True), (12, 2, 8), said.append),
        cache.get(model(schedule="learn"), MaskedLoss, config, (12, 2, 8), said.append),
        cache.get(model(block="preln"), MaskedLoss, config, (12, 2, 8), said.append),
        cache.get(model(num_hidden_layers=2), MaskedLoss, config, (12, 2, 8), said.append),
        cache.get(model(c_minus=-5.0), MaskedLoss, config, (12, 2, 8), said.append),
    ]
    assert len({id(stepper) for stepper in (first, *others)}) == 7
    cache.clear()
    assert cache.get(model(), MaskedLoss, config, (12, 2, 8), said.append) is not first


def test_an_optimiser_of_the_registry_is_all_that_the_step_knows(monkeypatch: pytest.MonkeyPatch):
    """Gradient descent, which has no state and no scalars, in a line of the registry."""

    class Descent(Optimiser):
        about, state = "gradient descent", ()

        @staticmethod
        def scalars(step: int) -> list[float]:
            return []

        @staticmethod
        def update(values, state, gradients, working, factor, lr, scalars, alive) -> None:
            assert state == ()
            assert len(scalars) == 0
            values.sub_(lr * factor * gradients)

    monkeypatch.setitem(OPTIMISERS, "descent", Descent)
    made, reference = model(schedule="learn"), model(schedule="learn")
    stepper, chunk = Stepper(made, MaskedLoss, StepConfig(CPU, optimiser="descent")), batches().chunk(0, 1)
    gradients = torch.autograd.grad(MaskedLoss(reference)(*(tensor[0] for tensor in chunk)), list(reference.parameters()))
    stepper.run(chunk, plan(made))
    for (name, parameter), gradient in zip(reference.named_parameters(), gradients, strict=True):
        assert (stepper.values()[name] - (parameter - 1e-2 * gradient)).abs().max() < 1e-6, name
    assert stepper.state().keys() == {"matrices.values", "head.values", "embeddings.values", "gains.values", "shaping.values", "shaping"}
