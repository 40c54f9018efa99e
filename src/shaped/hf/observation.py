"""Measures attention and tokens of every layer of a Hugging Face model during a forward pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor, nn

from shaped.hf.attention import find_self_attentions
from shaped.nn.attention_hooks import AttentionInputs, register_attention_hook
from shaped.nn.compiled import run_uncompiled
from shaped.nn.diagnostics import Source, measure

PADDING_MASKS = ("attention_mask", "decoder_attention_mask")


def find_layers(model: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Each layer and its self-attention, by the layer's name.

    A layer is the largest numbered part of the model that has this self-attention in it and no other.
    """
    modules, attentions = dict(model.named_modules()), find_self_attentions(model)

    def layer_of(name: str) -> str:
        for end in (match.end() for match in re.finditer(r"(?:^|\.)\d+(?=\.|$)", name)):
            if sum(other.startswith(name[:end] + ".") for other in attentions) == 1:
                return name[:end]
        return name

    return {layer_of(name): (modules[layer_of(name)], module) for name, module in attentions.items()}


class QuantityRecorder(AbstractContextManager["QuantityRecorder"]):
    """Hooks on a model that measure every layer in the next forward pass. Later passes, before `close`, change nothing.

    What is compiled runs uncompiled until `close`: its program would have these hooks in it, and keep its gaps for them.

    Args:
        model: has self-attention that goes through the attention interface.
        sequences: how many sequences of the batch are measured; all by default.
    """

    def __init__(self, model: nn.Module, sequences: int | None = None):
        self.layers = find_layers(model)
        self.values: dict[str, dict[str, float]] = {name: {} for name in self.layers}
        """The measured numbers: layer → quantity → number."""
        self._sequences = sequences
        self._masks: dict[str, Any] = {}
        self._measured: set[tuple[str, Source]] = set()
        eager = ExitStack()
        eager.enter_context(run_uncompiled())
        self._removals: list[Callable[[], None]] = [eager.close]
        self._removals.append(model.register_forward_pre_hook(self._keep_masks, with_kwargs=True).remove)
        for name, (layer, attention) in self.layers.items():
            self._removals.append(register_attention_hook(attention, self._attention_hook(name)))
            self._removals.append(layer.register_forward_hook(self._token_hook(name)).remove)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the hooks. May be called twice."""
        while self._removals:
            self._removals.pop()()

    def _keep_masks(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._masks = {name: kwargs.get(name) for name in PADDING_MASKS}

    def _real_tokens(self, name: str, like: Tensor, m: int) -> Tensor | None:
        """Which tokens are not padding, [batch, m]; None where the model was given no mask of this shape."""
        mask = self._masks.get(PADDING_MASKS["decoder" in name.split(".")])
        if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[0] >= len(like) and mask.shape[1] == m:
            return mask[: len(like)].bool().to(like.device)
        return None

    def _attention_hook(self, name: str) -> Callable[[nn.Module, AttentionInputs], None]:
        def hook(module: nn.Module, inputs: AttentionInputs) -> None:
            inputs = inputs.first(self._sequences)
            self._keep(name, Source.ATTENTION, inputs, self._real_tokens(name, inputs.q, inputs.q.shape[-2]))

        return hook

    def _token_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            x = output[0] if isinstance(output, tuple) else output
            if isinstance(x, Tensor) and x.ndim == 3:
                x = x[: self._sequences]
                self._keep(name, Source.TOKENS, x, self._real_tokens(name, x, x.shape[1]))

        return hook

    def _keep(self, name: str, source: Source, *arguments: object) -> None:
        """The first pass counts: gradient checkpointing and accumulated batches call the hooks again."""
        if (name, source) not in self._measured:
            self._measured.add((name, source))
            self.values[name] |= measure(source, *arguments)
