"""Records the parts of a model while it runs: which module is running, what enters and leaves it, and what it attends to."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from shaped.diagnosis.one_pass.attention_calls import CallWatcher, Logits
from shaped.diagnosis.one_pass.flow import Call, Flow, Node, iterate_floats
from shaped.diagnosis.one_pass.quantities import TokenQuantities, count_dead_units, measure_attention, measure_tokens
from shaped.diagnosis.one_pass.stack import (
    Part,
    Row,
    arrange_tokens,
    choose_entering,
    find_repeated_parts,
    find_rows,
    list_prefixes,
    list_tokens,
)


class LayerRecorder(AbstractContextManager["LayerRecorder"]):
    """Hooks on every module and a `CallWatcher`, for one forward pass. `parts` are those that ended, in order.

    Args:
        sequences: how many sequences of the batch are measured; all by default.
        tokens: how many tokens of a sequence are measured in the residual stream; all by default. The rank costs their third power.
    """

    def __init__(self, model: nn.Module, batch: Any, sequences: int | None = None, tokens: int | None = None):
        self.parts: list[Part] = []
        self.sequences, self.tokens = sequences, tokens
        self._model = model
        self._modules = dict(model.named_modules())
        self._repeated, self._rows = find_repeated_parts(model), find_rows(model)
        self._patterns = {name: re.sub(r"\d+", "*", name) for name in self._modules}
        self._masks = find_padding_masks(batch)
        self._two_sided = {"encoder", "decoder"} <= {word for name in self._modules for word in name.split(".")}
        self._running: list[tuple[str, nn.Module, Tensor | None, tuple[list[Node], int]]] = []
        self._open: dict[str, Part] = {}
        self._attended: set[tuple[str, type]] = set()
        """Patterns of which a part has attended: what enters the first one is known."""
        self.flow = Flow(self._measure_stream)
        self._attending: list[tuple[str, int, int]] = []
        """For each call of attention, which module attends, and how many sequences and queries."""
        self._activations: list[bool] = []
        self._real: Tensor | None = None
        self._batch_first = True
        self._watcher = CallWatcher(self)
        self._removals: list[Callable[[], None]] = []

    def __enter__(self) -> LayerRecorder:
        for name, module in self._modules.items():
            self._removals.append(module.register_forward_pre_hook(self._entry_hook(name), with_kwargs=True, prepend=True).remove)
            self._removals.append(module.register_forward_hook(self._exit_hook(name)).remove)
        self._watcher.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watcher.__exit__(*error)
        while self._removals:
            self._removals.pop()()
        for name in list(self._open) if error[0] is None else ():
            self._end(name, None)

    def begin_call(self, args: Any, kwargs: Any) -> None:
        """For a recorder that is entered within the model's call, in a pre-hook: PyTorch calls no pre-hook that is added then."""
        self._entry_hook("")(self._model, args, kwargs)

    def _entry_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            with self._watcher.pause():
                inputs = list_tokens((args, kwargs))
                prefixes = self._list_parts(name)
                if not is_plain_function(module):  # such as dropout, which may be one for all layers
                    self._end_uncalled(lambda part: part.name not in prefixes)
                for prefix, item in prefixes.items():
                    if prefix not in self._open:
                        self._begin(prefix, inputs, called=prefix == name)
                    if item and item not in self._open[prefix].items:
                        self._open[prefix].items.append(item)
                before = list(map(self.flow.find, iterate_floats((args, kwargs)))), len(self.flow.calls)
                self._running.append((name, module, inputs[0] if inputs else None, before))
                self._activations.append(False)
                self.flow.running = self._patterns[name]

        return hook

    def _exit_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            with self._watcher.pause():
                _, _, x, before = self._running.pop()
                if self._activations.pop() and x is not None and args:
                    self.see_activation(module.forward, args[0])
                self.flow.running = self._patterns[self._running[-1][0]] if self._running else ""
                self.flow.connect(*before, output)
                depth = len(self._running)
                self._end_uncalled(lambda part: part.frame > depth)
                if name in self._open and self._open[name].called:
                    self._end(name, output)

        return hook

    def _list_parts(self, name: str) -> dict[str, str]:
        """The parts that a module is in, the outermost first. Of a row: which of its items it is in."""
        parts = {"": ""}
        for prefix in list_prefixes(name):
            if prefix in self._rows:
                parts[self._rows[prefix]] = prefix
            if prefix in self._repeated:
                parts[prefix] = ""
        return parts

    def _begin(self, name: str, inputs: tuple[Tensor, ...], called: bool) -> None:
        kind = type(self._modules[name]) if name in self._modules else Row
        part = Part(name, kind, kind is Row or self._repeated.get(name, False), called, frame=len(self._running))
        if part.pattern not in self._attended:
            part.inputs = tuple(x.clone() for x in inputs)  # the layer may change them in place
        self._open[name] = part

    def _end_uncalled(self, ends: Callable[[Part], bool]) -> None:
        """Ends parts that are never called themselves, from the inside to the outside."""
        for name, part in reversed(list(self._open.items())):
            if not part.called and ends(part):
                self._end(name, None)

    def _end(self, name: str, output: Any) -> None:
        part = self._open.pop(name)
        if part.calls:
            self._attended.add(part.pattern)
            part.sums = min(len(call.streams) for call in part.calls)
            if part.sums:
                shape = part.calls[0].streams[part.sums - 1].shape
                fitting = {self.flow.find(x) for x in iterate_floats(output) if x.shape == shape}
                if len(fitting) == 1:
                    part.leaving = self.flow.measure(fitting.pop(), part.calls[-1]).tokens
            else:
                x = next(iter(list_tokens(output)), None)
                if part.inputs:
                    part.entering = self._measure(name, choose_entering(part.inputs, x))
                if x is not None:
                    part.leaving = self._measure(name, x)
        part.inputs = ()
        self.parts.append(part)

    def _measure_stream(self, x: Tensor, call: Call) -> TokenQuantities:
        name, *layout = self._attending[call.number]
        x = arrange_tokens(x, math.prod(layout))
        return self._measure(name, x, list(x.shape[:2]) == layout != layout[::-1])

    def _measure(self, name: str, x: Tensor, batch_first: bool = False) -> TokenQuantities:
        x = x if batch_first or self._batch_first else x.transpose(0, 1)
        real = self._first(self._find_real(name, x.shape[0], x.shape[1]))
        return measure_tokens(x[: self.sequences, : self.tokens], None if real is None else real[:, : self.tokens])

    def _first(self, real: Tensor | None) -> Tensor | None:
        return None if real is None else real[: self.sequences]

    def see_attention(self, mask: Tensor | None, logits: Logits, shape: tuple[int, ...], bound: float) -> None:
        name, _, x, _ = self._running[-1] if self._running else ("", self._model, None, None)
        batch, _, Q, K = shape
        self._attending.append((name, batch, Q))
        self._settle_layout(x, batch, Q)
        if not any(part.attention for part in self._open.values() if part.name):  # later ones in a layer may be cross-attention
            self._real = None
            if mask is not None and Q == K and mask.shape[0] == batch:
                self._real = (mask if mask.dtype == torch.bool else mask > -torch.inf).any(1).any(-2)
        real = self._find_real(name, batch, Q)
        found = measure_attention(logits(), self._first(real), bound)
        for part in self._open.values():
            own = part.find_own_name(name) or type(self._modules[name]).__name__
            while own in part.attention:
                own += "'"
            part.attention[own] = found
            part.calls.append(self.flow.calls[-1])

    def see_part_of_activation(self) -> None:
        if self._running and is_plain_function(self._running[-1][1]):
            self._activations[-1] = True

    def see_activation(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        if x.ndim < 2:
            return
        x = x if self._batch_first or x.ndim != 3 else x.transpose(0, 1)
        real = self._find_real(self._running[-1][0], *x.shape[:2]) if x.ndim == 3 and self._running else None
        x = x[: self.sequences] if x.ndim == 3 else x
        found = count_dead_units(function, x if real is None else x[real[: self.sequences]])
        for part in self._open.values():
            part.activations.append(found)

    def _settle_layout(self, x: Tensor | None, batch: int, Q: int) -> None:
        """Tokens are [batch, m, n], or [m, batch, n] as PyTorch's own modules have them by default."""
        if x is None or x.ndim != 3 or tuple(x.shape[:2]) not in ((batch, Q), (Q, batch)):
            return
        says_so = any(getattr(module, "batch_first", True) is False for _, module, _, _ in self._running)
        self._batch_first = tuple(x.shape[:2]) == (batch, Q) and not (says_so and batch == Q)

    def count_sequences(self, first: int, Q: int) -> int:
        """How many sequences there are in a first dimension that is batch · heads."""
        x = next((tokens for _, _, tokens, _ in reversed(self._running) if tokens is not None and Q in tokens.shape[:2]), None)
        if x is None:
            return 1
        batch = x.shape[1] if x.shape[0] == Q else x.shape[0]
        return batch if first % batch == 0 else 1

    def arrange_logits(self, s: Tensor) -> Tensor:
        """Softmax inputs as [batch, heads, Q, K]: some models have [batch, Q, heads, K] or [heads, batch, Q, K].

        Tokens that enter the running modules tell which it is. The usual order is tried first, and kept where none fits.
        """
        entering = {tuple(x.shape[:2]) for _, _, x, _ in self._running if x is not None}
        for order in ((0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)):
            batch, _, Q, _ = s.permute(order).shape
            if entering & {(batch, Q), (Q, batch)}:
                return s.permute(order)
        return s

    def _find_real(self, name: str, batch: int, m: int) -> Tensor | None:
        """Which tokens are not padding, [batch, m]: what the batch says, or which keys the last self-attention masked for every query."""
        decodes = "decoder" in name.split(".")
        ours = [mask for key, mask in self._masks.items() if not self._two_sided or is_of_decoder(key) == decodes]
        fitting = [mask for mask in (*ours, self._real) if mask is not None and tuple(mask.shape) == (batch, m)]
        real = next(iter(fitting), None)
        return None if real is None or bool(real.all()) else real


def find_padding_masks(batch: Any) -> dict[str, Tensor]:
    """Masks of tokens in the batch, [batch, m], True where a token is no padding.

    `attention_mask` in a name is transformers' convention (1: a token), `padding_mask` PyTorch's (True: padding).
    """
    found = {}
    for name, value in batch.items() if isinstance(batch, Mapping) else ():
        if isinstance(value, Tensor) and value.ndim == 2:
            if name.endswith("attention_mask") and not name.startswith(("cross_", "encoder_")):
                found[name] = value != 0
            elif name.endswith("padding_mask") and not name.startswith("memory_"):
                found[name] = ~(value == -math.inf) if value.is_floating_point() else value == 0
    return found


def is_of_decoder(name: str) -> bool:
    """Is this the padding of a decoder's own tokens? `decoder_attention_mask` is transformers' name, `tgt_key_padding_mask` PyTorch's."""
    return name.startswith(("decoder_", "tgt_"))


def is_plain_function(module: nn.Module) -> bool:
    """Has it neither parameters, buffers nor parts?"""
    return not any(True for _ in (*module.parameters(), *module.buffers(), *module.children()))
