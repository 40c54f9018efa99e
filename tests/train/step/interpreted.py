"""The fused blocks of a model in Triton's interpreter, which must be enabled before Triton is imported: in a process of its own."""

import copy
from contextlib import nullcontext
from typing import Any

import torch

from shaped.hf import ShapedConfig, ShapedForCausalLM, ShapedForMaskedLM
from shaped.kernels import attention_correction, fused_block, long_attention, relu_matmul, relu_matmul_hopper, short_attention
from shaped.train.step.config import StepConfig
from shaped.train.step.objectives.causal_lm import CausalLoss
from shaped.train.step.objectives.masked_lm import MaskedLoss
from shaped.train.step.stepper import Stepper
from stock_attention import attend_plainly, attend_plainly_backward

torch.cuda.device_of = lambda tensor: nullcontext()  # there is no GPU
short_attention.fits = long_attention.fits = lambda x, D: True
attention_correction.attend, attention_correction.attend_backward = attend_plainly, attend_plainly_backward
relu_matmul_hopper.count_multiprocessors = lambda device: 1


def check(schedule: str, train_gains: bool, qk_norm: bool = False, causal: bool = False, qk_gain: bool = False) -> None:
    """Tokens, and gradients of tokens, weights and gains, against autograd in double precision. A causal model has rotary positions."""
    torch.manual_seed(0)
    heads = 3 if causal or qk_gain else 2  # the kernels of long sequences take heads of 16 features
    sizes: dict[str, Any] = {"vocab_size": 30, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": heads}
    sizes |= {"max_position_embeddings": 20, "gamma": 0.4, "tau0": 0.2, "positions": "rope" if causal else "learned"}
    kind, loss = (ShapedForCausalLM, CausalLoss) if causal else (ShapedForMaskedLM, MaskedLoss)
    made: Any = kind(ShapedConfig(**sizes, schedule=schedule, train_gains=train_gains, qk_norm=qk_norm, qk_gain=qk_gain))
    for layer in made.model.layers if qk_gain else ():  # they start at 1, where a gain that is left out would not show
        for gain in layer.block.attention.qk_gains.parameters():
            torch.nn.init.normal_(gain, 1.0, 0.5)
    stepper = Stepper(made, loss, StepConfig(torch.device("cpu")))
    stepper.set_share(0.7)
    twin: Any = stepper.twin
    blocks = loss(twin, "blocks")._run["blocks"]
    for block in blocks:
        block.fallback = None  # nothing but the fused kernels
    exact: Any = copy.deepcopy(made).double()
    x, weight = (torch.randn(3, m, 48, generator=torch.Generator().manual_seed(m)) for m in (20, 4))
    places = torch.tensor([[0, 7, 19, 3], [4, 5, 6, 7], [19, 18, 1, 0]])  # the tokens that the last block is asked for
    x.requires_grad_()
    y, expected = x, (start := x.detach().double().requires_grad_())
    rotation, exact_rotation = (model.model.rotate(torch.arange(20)[None]) for model in (twin, exact))
    for block, layer in zip(blocks, exact.model.layers, strict=True):
        wanted = places if block is blocks[-1] else None
        y, expected = block(y, places=wanted, rotation=rotation), layer.block(expected, places=wanted, rotation=exact_rotation)
    near(y, expected, "tokens")
    reference = {name: parameter for name, parameter in exact.named_parameters() if ".block." in name}
    gradients = torch.autograd.grad(expected, [start, *reference.values()], weight.double())
    own = dict(twin.named_parameters())
    gains = [name for name, parameter in reference.items() if parameter.ndim < 2]
    assert len(gains) == 2 * (4 * train_gains + 3 * (schedule == "learn") + 2 * qk_gain)
    found = torch.autograd.grad(y, [x, *(own[name] for name in gains)], weight)
    written = stepper.gradients() | dict(zip(gains, found[1:], strict=True))
    near(found[0], gradients[0], "gradient of the tokens")
    for name, gradient in zip(reference, gradients[1:], strict=True):
        near(written[name], gradient, name)


def near(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    error = float((found.detach().double() - expected.detach()).abs().max() / expected.detach().abs().max())
    # A gain's gradient may be a small sum of large terms.
    assert error < (2e-5 if expected.numel() > 1 else 2e-4), f"{what}: {error}"


for module in (relu_matmul, relu_matmul_hopper):
    fused_block.choose_relu_matmul = lambda x, weight, module=module: module
    check("recover", True)
    check("learn", True, qk_norm=module is relu_matmul)
    check("fixed", False)
check("recover", True, qk_norm=True, qk_gain=True)
check("learn", False, qk_norm=True, causal=True, qk_gain=True)
check("recover", True, qk_norm=True, causal=True)
check("learn", True, causal=True)
print("all near")
