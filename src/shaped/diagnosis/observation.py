"""One forward and one backward pass of a model: every quantity of every layer. The model is left as it was."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shaped.diagnosis.one_pass.attention_calls import expose_to_modes
from shaped.diagnosis.one_pass.layer_calls import LayerRecorder
from shaped.diagnosis.one_pass.losses import Loss, choose_loss
from shaped.diagnosis.one_pass.quantities import AttentionQuantities, TokenQuantities
from shaped.diagnosis.one_pass.stack import Part, choose_layers, has_stream
from shaped.diagnosis.one_pass.unchanged import keep_unchanged
from shaped.nn.compiled import unwrap
from shaped.nn.diagnostics import measure_length
from shaped.process import quote_error

LIST, ARRAY = "a list of numbers", "a numpy array"
SEEN_GRAD = expose_to_modes(torch.autograd.grad)


@dataclass(frozen=True)
class LayerObservation:
    name: str
    tokens: TokenQuantities
    """Of the residual stream that leaves the layer."""
    attention: dict[str, AttentionQuantities]
    """By the name of the module that attends, within the layer. A decoder's layer has two, of self- and cross-attention."""
    gradients: dict[str, float]
    """Norm of the gradient of each weight matrix, by its name within the layer."""
    dead: float
    """Share of the activations' units that are dead; nan where no activation was seen."""


@dataclass(frozen=True)
class StackObservation:
    name: str
    entering: TokenQuantities
    """Of the residual stream before the first layer."""
    layers: tuple[LayerObservation, ...]
    unseen: str = ""
    """What is not known of its residual stream, in words; empty if it was seen everywhere."""


@dataclass(frozen=True)
class Observation:
    stacks: tuple[StackObservation, ...]
    loss: float
    loss_kind: str
    """What was differentiated, in words."""
    non_finite: str
    """The first place that is not finite, in words; empty if all is."""


def observe(model: nn.Module, batch: Any, loss: Loss | None = None, change: AbstractContextManager[Any] | None = None) -> Observation:
    """Measures a model in one forward and one backward pass, in evaluation mode: without dropout.

    Args:
        model: any module whose attention is `scaled_dot_product_attention`, `shaped_attention` or a softmax of a product.
        batch: its arguments: a mapping of names, a tuple of positions, or one tensor. Tensors are moved to the model's device.
        loss: from the model's output and the batch to a number. By default the output's `loss`, the output itself if it is one number,
            or else a fixed random projection of the output.
        change: is active during the forward pass, such as a mode that changes what the model calls (`shaped.diagnosis.remedies.changes`).
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    model = unwrap(model)
    if is_sharded(model):  # `grad` would find the gradients of no shard
        raise ValueError(
            f"model must be whole, got {type(model).__name__} with weights that FSDP has sharded: diagnose it before, or watch its training"
        )
    with torch.inference_mode(False):
        batch = move_batch(batch, find_device(model))
    recorder = LayerRecorder(model, batch)
    with ExitStack() as stack:
        stack.enter_context(keep_unchanged(model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())  # the caller may have switched them off, as one does to evaluate
        model.eval()
        with recorder, change or nullcontext():
            output = call_model(model, batch)
        stacks = find_stacks(model, recorder)  # before the backward pass, which a model without attention need not wait for
        value, kind = choose_loss(output, batch, loss)
        if loss is not None and not value.requires_grad and any(p.requires_grad for p in model.parameters()):
            raise ValueError(
                f"loss must depend on the model's output, without detach, item or argmax, got {float(value):g} without a gradient"
            )
        with torch.autograd.set_multithreading_enabled(False), change or nullcontext():  # checkpointed parts run again, with the change
            gradients = differentiate(model, value)
    observed = make_stacks(model, stacks, gradients)
    number = float(value.detach())
    kind += "" if gradients else " (no weight matrix has a gradient of it)"
    return Observation(observed, number, kind, find_non_finite(model, observed, number, gradients))


def call_model(model: nn.Module, batch: Any) -> Any:
    try:
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple) else model(batch)
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise
        said, got = quote_error(error), describe_batch(batch)
        hint = ", in tensors" if LIST in got or ARRAY in got else ""
        raise ValueError(f"batch must be what {type(model).__name__} takes{hint}, got {got}: {said}") from error


def differentiate(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of the weight matrices that are trained, by name. The parameters' own `grad` and their hooks are not touched."""
    matrices = {name: p for name, p in model.named_parameters() if p.requires_grad and p.ndim >= 2}
    if not matrices or not loss.requires_grad:
        return {}
    if has_node(loss, "CheckpointFunctionBackward"):  # `grad` would leave out what it wraps
        raise ValueError(f"model must checkpoint with use_reentrant=False, got reentrant checkpoints in {type(model).__name__}")
    found = SEEN_GRAD(loss, list(matrices.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(matrices, found, strict=True) if gradient is not None}


def is_sharded(model: nn.Module) -> bool:
    """Does FSDP, of either version, gather its weights for each pass?"""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # loaded by who uses it
    kinds = () if fsdp is None else (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    return any(isinstance(module, kinds) for module in model.modules())


def has_node(loss: Tensor, name: str) -> bool:
    """Is there an operation of this name in the graph of the loss?"""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            if node.name() == name:
                return True
            seen.add(node)
            waiting += [other for other, _ in node.next_functions]
    return False


def find_stacks(model: nn.Module, recorder: LayerRecorder) -> dict[str, list[Part]]:
    """The layers of each stack, as they were recorded. A model in which no attention was seen is refused."""
    stacks = choose_layers(recorder.parts)
    if not stacks:
        raise ValueError(
            f"model must have attention through scaled_dot_product_attention, shaped_attention or a softmax of queries times keys, "
            f"got {type(model).__name__}, in which none was seen"
        )
    return stacks


def make_stacks(model: nn.Module, stacks: Mapping[str, list[Part]], matrices: Mapping[str, Tensor]) -> tuple[StackObservation, ...]:
    """`matrices`: gradients of the weight matrices by name, or the norms of these gradients."""
    matrices = add_other_names(model, matrices)
    return tuple(
        StackObservation(
            name,
            parts[0].entering,
            tuple(make_layer(*labelled, matrices) for labelled in label_parts(parts)),
            describe_unseen(name or "the model", parts),
        )
        for name, parts in stacks.items()
    )


def describe_unseen(name: str, parts: list[Part]) -> str:
    labels = [label for _, label in label_parts(parts)]
    places = [] if parts[0].entering.tokens else [f"before {labels[0]}"]
    places += [f"behind {label}" for part, label in zip(parts, labels, strict=True) if not part.leaving.tokens]
    if places:
        return f"the residual stream was not seen {', '.join(places[:3])}" + (
            f" and at {len(places) - 3} more places" if places[3:] else ""
        )
    if not has_stream(parts):
        return f"no residual sum was seen in {name}: its numbers are of what the layers take and return"
    return ""


def add_other_names(model: nn.Module, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Also by the other names of weights that several modules share: each layer that uses them has their gradient."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = ((name, first[id(parameter)]) for name, parameter in model.named_parameters(remove_duplicate=False))
    return {name: matrices[own] for name, own in every if own in matrices}


def label_parts(parts: Iterable[Part]) -> Iterator[tuple[Part, str]]:
    """Parts and their names. A layer that is called several times, as in ALBERT, has the call's number too."""
    seen: Counter[str] = Counter()
    for part in parts:
        seen[part.name] += 1
        name = part.name or "the model"
        yield part, name if seen[part.name] == 1 else f"{name} (call {seen[part.name]})"


def make_layer(part: Part, label: str, gradients: Mapping[str, Tensor]) -> LayerObservation:
    units = sum(one.units for one in part.activations)
    inside = {own: value for name, value in gradients.items() if (own := part.find_own_name(name)) is not None}
    once = {id(value): name for name, value in reversed(inside.items())}  # by the first of several names of one matrix
    return LayerObservation(
        name=label,
        tokens=part.leaving,
        attention=dict(part.attention),
        gradients={name: measure_length(value) for name, value in inside.items() if once[id(value)] == name},
        dead=sum(one.dead for one in part.activations) / units if units else math.nan,
    )


def find_non_finite(model: nn.Module, stacks: Iterable[StackObservation], loss: float, gradients: Mapping[str, Tensor]) -> str:
    """The first parameter, stream, loss or gradient that is not finite, in words."""
    broken = [name for name, parameter in model.named_parameters() if not is_finite(parameter)]
    if broken:
        return f"parameter {broken[0]}" + (f" and {len(broken) - 1} more" if len(broken) > 1 else "")
    for stack in stacks:
        if stack.entering.tokens and not math.isfinite(stack.entering.length):
            return f"tokens that enter {stack.layers[0].name}"
        for layer in stack.layers:
            if layer.tokens.tokens and not math.isfinite(layer.tokens.length):
                return f"tokens behind layer {layer.name}"
    if not math.isfinite(loss):
        return "the loss"
    last = [name for name, gradient in gradients.items() if not is_finite(gradient)]
    return f"gradient of {last[-1]}" if last else ""


def is_finite(x: Tensor) -> bool:
    """Their sum tells it in one pass over memory, unless it overflows."""
    return bool(x.detach().sum().isfinite()) or bool(x.detach().isfinite().all())


def find_device(model: nn.Module) -> torch.device:
    return next((x.device for x in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def move_batch(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on this device. Its own containers stay as they are."""
    if isinstance(batch, Tensor):
        batch = batch.to(device)
        return batch.clone() if batch.is_inference() else batch  # the backward pass may save it
    if isinstance(batch, Mapping):
        return {name: move_batch(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(move_batch(value, device) for value in batch)
    return batch


def describe_batch(batch: Any) -> str:
    """Names and shapes, for a message."""
    if isinstance(batch, Mapping):
        return ", ".join(f"{name} {describe_batch(value)}" for name, value in batch.items()) or "nothing"
    if has_numbers(batch):
        return LIST
    if isinstance(batch, tuple):
        return "(" + ", ".join(map(describe_batch, batch)) + ")"
    if isinstance(batch, np.ndarray):
        return f"{ARRAY} {list(batch.shape)}"
    return f"{list(batch.shape)}" if isinstance(batch, Tensor) else f"{batch!r:.40}"


def has_numbers(batch: Any) -> bool:
    """Is it a list of numbers, or of such lists, as tokenizers return them? `move_batch` has made a tuple of each."""
    return isinstance(batch, tuple) and bool(batch) and all(isinstance(value, int | float) or has_numbers(value) for value in batch)
