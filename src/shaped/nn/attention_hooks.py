"""Hooks on an attention module that see its queries and keys, which PyTorch's forward hooks do not.

A hook belongs to one module, as PyTorch's do: other models and other threads that run them are not seen. Without hooks an attention
pays one attribute lookup, and under `torch.compile` one guard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

NAME = "attention_hooks"
_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """What the softmax of an attention is computed from: softmax(q kᵀ · scale + mask)."""

    q: Tensor
    k: Tensor
    scale: float
    mask: Tensor | None
    is_causal: bool

    def first(self, sequences: int | None) -> AttentionInputs:
        """The first sequences of the batch, all of them for None."""
        if sequences is None:
            return self
        mask = self.mask
        if mask is not None and mask.ndim == self.q.ndim and mask.shape[0] > 1:  # one of fewer dimensions is the same for all sequences
            mask = mask[:sequences]
        return AttentionInputs(self.q[:sequences], self.k[:sequences], self.scale, mask, self.is_causal)


AttentionHook = Callable[[nn.Module, AttentionInputs], None]


def register_attention_hook(module: nn.Module, hook: AttentionHook) -> Callable[[], None]:
    """Calls the hook at every attention of this module, until the function that this returns is called."""
    entry = (hook,)  # an object of its own: a hook that is registered twice is removed once at a time

    def remove() -> None:
        with _lock:
            rest = tuple(other for other in module.__dict__.get(NAME, ()) if other is not entry)
            if rest:
                module.__dict__[NAME] = rest
            else:
                module.__dict__.pop(NAME, None)

    with _lock:
        module.__dict__[NAME] = (*module.__dict__.get(NAME, ()), entry)
    return remove


def call_attention_hooks(module: nn.Module, q: Tensor, k: Tensor, scale: float, mask: Tensor | None, is_causal: bool) -> None:
    """For the code that computes the attention."""
    for (hook,) in getattr(module, NAME, ()):
        hook(module, AttentionInputs(q, k, scale, mask, is_causal))
