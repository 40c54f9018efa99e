"""Measures a training step in its own forward and backward pass: no extra pass, nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from shaped.diagnosis.observation import StackObservation, find_stacks, make_stacks
from shaped.diagnosis.one_pass.layer_calls import LayerRecorder
from shaped.nn.compiled import run_uncompiled, unwrap

TOKENS = 128
"""Tokens of a sequence that are measured in the residual stream."""


class StepRecorder:
    """Records the model's next forward pass. Later passes of the step (accumulated batches, checkpointed layers) are not seen.

    The function mode is on from the beginning to the end of that pass, so the rest of the step runs as always. Passes of a validation
    between two steps do not count: those without gradients, and those in evaluation mode if one in training mode follows. Nor does a pass
    that failed. Norms of gradients are taken while the backward pass adds them: before anything clips them or sets them to zero.
    What is compiled runs uncompiled until `close`: the compiler would hide what it calls.

    Args:
        sequences: how many sequences of the batch are measured.
    """

    def __init__(self, model: nn.Module, sequences: int):
        self.model = unwrap(model)
        self._sequences = sequences
        self._recorder: LayerRecorder | None = None
        self._saw_training = False
        self._eager, self._pass = ExitStack(), ExitStack()
        self._eager.enter_context(run_uncompiled())
        self._removals: list[Callable[[], None]] = [
            self.model.register_forward_pre_hook(Hook(self._begin), with_kwargs=True, prepend=True).remove
        ]
        self._norms: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.ndim >= 2:
                self._removals.append(register_first(parameter, self._norm_hook(name)))

    def measure(self, scale: float | None = None) -> tuple[StackObservation, ...]:
        """Every quantity of every layer. `scale`: what the loss was multiplied by; gradients that overflow for it are left out."""
        if self._recorder is None:
            raise ValueError(
                f"model must be called with gradients in every step that is watched, got no call of {type(self.model).__name__}: "
                "watch the module that the loop calls"
            )
        norms = self._norms if scale is None else {name: norm / scale for name, norm in self._norms.items()}
        if scale is not None and not all(bool(norm.isfinite()) for norm in norms.values()):
            norms = {}
        return make_stacks(self.model, find_stacks(self.model, self._recorder), norms)

    def close(self) -> None:
        """Removes the hooks. May be called twice."""
        while self._removals:
            self._removals.pop()()
        self._pass.close()
        self._eager.close()

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        is_better = self._recorder is None or (module.training and not self._saw_training)
        if torch.is_grad_enabled() and is_better:
            self._pass.close()
            self._saw_training = module.training
            self._recorder = self._pass.enter_context(LayerRecorder(self.model, kwargs, self._sequences, TOKENS))
            self._recorder.begin_call(args, kwargs)
            # Registered now: it must come after the recorder's own hook of the model.
            self._pass.callback(self.model.register_forward_hook(Hook(self._end), always_call=True).remove)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._pass.close()
        if output is None:  # an error in the pass, which the loop may catch: out of memory
            self._recorder = None

    def _norm_hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None:  # accumulated batches call this again: the last norm is that of their sum
                gradient = parameter.grad.detach()
                gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
                self._norms[name] = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(parameter.dtype, torch.float32))

        return hook


def register_first(parameter: Tensor, hook: Callable[[Tensor], None]) -> Callable[[], None]:
    """Registers a hook for the parameter's gradient, before those of the loop: one may update the weights and free the gradient. Returns
    what removes it."""
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks: Any = parameter._post_accumulate_grad_hooks  # they are called in the order of their entry, and PyTorch has no `prepend` for them
    for other in [number for number in hooks if number != handle.id]:
        hooks[other] = hooks.pop(other)
    return handle.remove


class Hook:
    """A hook that does nothing in a copy of the model, and in one that is loaded: a loop may copy or save the model between two steps."""

    def __init__(self, function: Callable[..., None]):
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (do_nothing,)


def do_nothing(*_: Any) -> None:
    pass


@torch.no_grad()
def measure_batch(model: nn.Module, batch: Mapping[str, Any], gradients: Mapping[str, Tensor]) -> tuple[StackObservation, ...]:
    """For a training step that no hook sees, such as a CUDA graph: one more forward pass of a batch, and the step's gradients by name."""
    with LayerRecorder(model, batch, tokens=TOKENS) as recorder:
        model(**batch)
    matrices = {name: gradient for name, gradient in gradients.items() if gradient.ndim >= 2}
    return make_stacks(model, find_stacks(model, recorder), matrices)
