"""The step: the Hugging Face model's loss, PyTorch's Adam, the same in bfloat16 and after a restart."""

from typing import Any

import pytest
import torch

from refusals import refused
from shaped.hf import ShapedForSequenceClassification
from shaped.train.step.attention_backends import BACKENDS, CHOICES, attention_backend
from shaped.train.step.config import StepConfig
from shaped.train.step.flat_parameters import classify_parameters
from shaped.train.step.objectives.classification import ClassifierLoss
from shaped.train.step.objectives.masked_lm import MaskedLoss
from shaped.train.step.optimisers import OPTIMISERS, Optimiser
from shaped.train.step.stepper import Stepper
from shaped.train.step.stepper_cache import StepperCache
from train.step.steppers import CPU, batches, fail_to_compile, make_schedule, model

ARMS: list[dict[str, Any]] = [
    {"schedule": "fixed"},
    {"schedule": "learn", "qk_norm": True},
    {"schedule": "recover", "qk_norm": True, "qk_gain": True},
    {"block": "preln"},
    {"block": "preln", "norm": "rms", "qk_norm": True, "init": "gpt2"},
    {"block": "postln", "norm": "rms"},
    {"block": "vanilla", "qk_norm": True},
    {"block": "dyt", "init": "bert"},
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_the_loss_is_that_of_the_hugging_face_model(arm: dict[str, Any], tied: bool):
    made = model(tie_word_embeddings=tied, **arm)
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
    made, reference = model(schedule=schedule), model(schedule=schedule)
    reference.load_state_dict(made.state_dict())
    data = batches()
    stepper = Stepper(made, MaskedLoss, StepConfig(CPU, clips=clip > 0))
    losses = stepper.run(data.chunk(0, 16), make_schedule(made, clip=clip, factors={"gains": 3.0, "shaping": 2.0}))
    losses += stepper.run(data.chunk(16, 4), make_schedule(made, clip=clip, factors={"gains": 3.0, "shaping": 2.0}))
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
    arms = classify_parameters(model(block="dyt", qk_norm=True, qk_gain=True))
    assert arms["model.layers.0.block.attention.qk_gains.query"] == arms["model.norm.alpha"] == "vectors"
    tied = classify_parameters(model(tie_word_embeddings=True))
    assert "head" not in tied.values()


def test_the_model_is_a_view_of_what_is_trained():
    made = model(schedule="recover")
    stepper = Stepper(made, MaskedLoss, StepConfig(CPU))
    before = made.head.weight.clone()
    stepper.run(batches().chunk(0, 4), make_schedule(made))
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
        losses.append(stepper.run(data.chunk(0, 16), make_schedule(made)))
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
    expected = alone.run(data.chunk(0, 8), make_schedule(other))
    stepper = Stepper(one, MaskedLoss, StepConfig(CPU))
    stepper.run(data.chunk(0, 16), make_schedule(one))
    stepper.adopt(other)
    assert stepper.run(data.chunk(0, 8), make_schedule(other)) == expected


def test_frozen_parameters_are_refused():
    made = model()
    made.head.weight.requires_grad_(False)
    with refused("model", "head.weight", "frozen"):
        Stepper(made, MaskedLoss, StepConfig(CPU))


@pytest.mark.parametrize("arm", [ARMS[i] for i in (0, 2, 3, 4, 5, 7)], ids=str)
def test_a_stream_in_bfloat16_follows_float32(arm: dict[str, Any]):
    losses = []
    for stream in (torch.float32, torch.bfloat16):
        made = model(**arm)
        stepper, seen = Stepper(made, MaskedLoss, StepConfig(CPU, half=True, stream=stream)), []

        def look(module: Any, given: Any, tokens: Any, seen: list[torch.dtype] = seen) -> None:
            seen.extend([given[0].dtype, tokens.dtype])

        for layer in stepper.twin.get_submodule("model.layers").children():
            layer.get_submodule("block").register_forward_hook(look)
        losses.append(stepper.run(batches().chunk(0, 16), make_schedule(made, lr=3e-3)))
        assert set(seen) == {stream}
    assert losses[1] == pytest.approx(losses[0], rel=2**-6)
    assert losses[1] != losses[0]


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
    monkeypatch.setattr(torch.backends.cuda, "enable_flash_sdp", fail_to_compile)
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
        cache.get(model(qk_norm=True), MaskedLoss, config, (12, 2, 8), said.append),
        cache.get(model(qk_norm=True, qk_gain=True), MaskedLoss, config, (12, 2, 8), said.append),
        cache.get(model(qk_norm=True, tau0=0.5), MaskedLoss, config, (12, 2, 8), said.append),
        cache.get(model(block="preln", norm="rms"), MaskedLoss, config, (12, 2, 8), said.append),
        cache.get(model(block="dyt"), MaskedLoss, config, (12, 2, 8), said.append),
    ]
    assert len({id(stepper) for stepper in (first, *others)}) == 12
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
    stepper.run(chunk, make_schedule(made))
    for (name, parameter), gradient in zip(reference.named_parameters(), gradients, strict=True):
        assert (stepper.values()[name] - (parameter - 1e-2 * gradient)).abs().max() < 1e-6, name
    assert stepper.state().keys() == {"matrices.values", "head.values", "embeddings.values", "gains.values", "shaping.values", "shaping"}
