"""Records the parts of a model while it runs: which module is running, what enters and leaves it, and what it attends to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shaped.diagnosis.one_pass.attention_calls import CallWatcher, Logits
from shaped.diagnosis.one_pass.quantities import count_dead_units, measure_attention, measure_tokens
from shaped.diagnosis.one_pass.stack import (
    Part,
    Row,
    choose_entering,
    find_repeated_parts,
    find_rows,
    find_tokens,
    iterate_features,
    list_prefixes,
    list_tokens,
)


@dataclass
class Sibling:
    """The part of a list that began last. Its tensors are kept, so that no other one has their memory."""

    part: Part
    inputs: tuple[Tensor, ...]
    entering: list[tuple[int, int]]
    returned: Tensor | None = None


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
        self._masks = find_padding_masks(batch)
        self._two_sided = {"encoder", "decoder"} <= {word for name in self._modules for word in name.split(".")}
        self._running: list[tuple[str, nn.Module, Tensor | None]] = []
        self._open: dict[str, Part] = {}
        self._attended: set[tuple[str, type]] = set()
        """Patterns of which a part has attended: what enters the first one is known."""
        self._siblings: dict[str, Sibling] = {}
        """What began last, by the list or module that it is in."""
        self._returned: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """What parts returned, also scaled: these parts."""
        self._activations: list[bool] = []
        self._number = 0
        self._real: Tensor | None = None
        self._batch_first = True
        self._watcher = CallWatcher(
            *(self._attend, self._count_dead, self._see_part, self._see_sum, self._see_scaling, self._count_sequences, self._arrange),
            first=sequences,
        )
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
        self._siblings.clear()

    def begin_call(self, args: Any, kwargs: Any) -> None:
        """For a recorder that is entered within the model's call, in a pre-hook: PyTorch calls no pre-hook that is added then."""
        self._entry_hook("")(self._model, args, kwargs)

    def _entry_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            with self._watcher.pause():
                inputs = tuple(list_tokens((args, kwargs)))
                x = inputs[0] if inputs else None
                prefixes = self._list_parts(name)
                if not is_plain_function(module):  # such as dropout, which may be one for all layers
                    self._end_uncalled(lambda part: part.name not in prefixes, x)
                for prefix, item in prefixes.items():
                    if prefix not in self._open:
                        self._begin(prefix, inputs, called=prefix == name)
                    if item and item not in self._open[prefix].items:
                        self._open[prefix].items.append(item)
                self._running.append((name, module, x))
                self._activations.append(False)

        return hook

    def _exit_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            with self._watcher.pause():
                _, _, x = self._running.pop()
                if self._activations.pop() and x is not None and args:
                    self._count_dead(module.forward, args[0])
                depth, y = len(self._running), find_tokens(output)
                self._end_uncalled(lambda part: part.frame > depth, y)
                self._see_stream(y)
                if name in self._open and self._open[name].called and not any(running == name for running, _, _ in self._running):
                    self._finish(name, output)

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
        part.shapes = frozenset(x.shape for x in inputs)
        if part.pattern not in self._attended:
            part.inputs = tuple(x.clone() for x in inputs)  # the layer may change them in place
        place, entering = name.rpartition(".")[0], [locate(x) for x in inputs]
        before = self._siblings.get(place)
        if before is not None and before.part.name != name:
            part.is_beside = bool(entering) and entering == before.entering
            before.part.is_passed_on = before.returned is not None and any(x.data_ptr() == before.returned.data_ptr() for x in inputs)
        if name:
            self._siblings[place] = Sibling(part, inputs, entering)
        self._open[name] = part

    def _end_uncalled(self, ends: Callable[[Part], bool], x: Tensor | None) -> None:
        """Ends parts that are never called themselves, from the inside to the outside. `x` is the stream then, if it has its shape."""
        for name, part in reversed(list(self._open.items())):
            if not part.called and ends(part):
                self._end(name, x if x is not None and x.shape in part.shapes else part.last)

    def _finish(self, name: str, output: Any) -> None:
        """Ends a part that was called."""
        part, x = self._open[name], find_tokens(output)
        self._end(name, x)
        sibling = self._siblings.get(name.rpartition(".")[0])
        if sibling is not None and sibling.part is part:
            sibling.returned = x
        for y in iterate_features(output) if part.calls else ():
            self._returned[y] = part
            break

    def _end(self, name: str, x: Tensor | None) -> None:
        part = self._open.pop(name)
        if part.calls:
            self._attended.add(part.pattern)
            if part.inputs:
                part.entering = self._measure(name, choose_entering(part.inputs, x))
            if x is not None:
                part.leaving = self._measure(name, x)
        part.inputs, part.last = (), None
        self.parts.append(part)

    def _see_stream(self, x: Tensor | None) -> None:
        """What the running module has now may be the stream in the parts that it runs through."""
        for part in self._open.values():
            if x is not None and not part.called and part.frame == len(self._running) and x.shape in part.shapes:
                part.last = x

    def _see_sum(self, first: Any, second: Any, result: Tensor) -> None:
        """A module that runs adds up what its parts return: that is the stream, where they are branches."""
        if not (isinstance(first, Tensor) and isinstance(second, Tensor) and first.shape == second.shape == result.shape):
            return
        x = find_tokens(result)
        if x is None:
            return
        self._see_stream(x)
        for branch, other in ((first, second), (second, first)):
            part = self._returned.get(branch)
            if part is not None and part.frame == len(self._running) and x.shape in part.shapes:
                part.summed = self._measure(part.name, x)
                before = None if other is result else find_tokens(other)  # in place: it is overwritten
                if part.entering.tokens and before is not None:
                    part.summand = self._measure(part.name, before)
                return

    def _see_scaling(self, args: Any, result: Any) -> None:
        for x in args:
            if isinstance(x, Tensor) and x in self._returned and isinstance(result, Tensor) and result.shape == x.shape:
                self._returned[result] = self._returned[x]

    def _measure(self, name: str, x: Tensor) -> Any:
        x = x if self._batch_first else x.transpose(0, 1)
        real = self._first(self._find_real(name, x.shape[0], x.shape[1]))
        return measure_tokens(x[: self.sequences, : self.tokens], None if real is None else real[:, : self.tokens])

    def _first(self, real: Tensor | None) -> Tensor | None:
        return None if real is None else real[: self.sequences]

    def _attend(self, mask: Tensor | None, logits: Logits, shape: tuple[int, ...], bound: float) -> None:
        name, _, x = self._running[-1] if self._running else ("", self._model, None)
        batch, _, Q, K = shape
        self._settle_layout(x, batch, Q)
        if not any(part.attention for part in self._open.values() if part.name):  # later ones in a layer may be cross-attention
            self._real = None
            if mask is not None and Q == K and mask.shape[0] == batch:
                self._real = (mask if mask.dtype == torch.bool else mask > -torch.inf).any(1).any(-2)
        real = self._find_real(name, batch, Q)
        found = measure_attention(logits(), self._first(real), bound)
        self._number += 1
        for part in self._open.values():
            own = part.find_own_name(name) or type(self._modules[name]).__name__
            while own in part.attention:
                own += "'"
            part.attention[own] = found
            part.calls.add(self._number)

    def _see_part(self) -> None:
        if self._running and is_plain_function(self._running[-1][1]):
            self._activations[-1] = True

    def _count_dead(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
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
        says_so = any(getattr(module, "batch_first", True) is False for _, module, _ in self._running)
        self._batch_first = tuple(x.shape[:2]) == (batch, Q) and not (says_so and batch == Q)

    def _count_sequences(self, first: int, Q: int) -> int:
        """How many sequences there are in a first dimension that is batch · heads."""
        x = next((tokens for _, _, tokens in reversed(self._running) if tokens is not None and Q in tokens.shape[:2]), None)
        if x is None:
            return 1
        batch = x.shape[1] if x.shape[0] == Q else x.shape[0]
        return batch if first % batch == 0 else 1

    def _arrange(self, s: Tensor) -> Tensor:
        """Softmax inputs as [batch, heads, Q, K]: some models have [batch, Q, heads, K] or [heads, batch, Q, K].

        Tokens that enter the running modules tell which it is. The usual order is tried first, and kept where none fits.
        """
        entering = {tuple(x.shape[:2]) for _, _, x in self._running if x is not None}
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


def locate(x: Tensor) -> tuple[int, int]:
    """Its memory, and how often that was written: the same for the parts of one tensor."""
    return x.untyped_storage().data_ptr(), x._version


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
