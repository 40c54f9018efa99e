"""Finds the layers of a model, from what it calls: the repeated part around each attention, and the residual stream between these parts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shaped.diagnosis.one_pass.quantities import NO_TOKENS, AttentionQuantities, DeadUnits, TokenQuantities

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass
class Part:
    """One visit to a part of the model: a module's call, or the calls within an item of a list that is itself never called."""

    name: str
    kind: type
    in_list: bool
    """Is it an item of a list? Others are attributes that have a class in common with a sibling."""
    called: bool = False
    """Is it a module that is called itself? Else it ends where a module outside of it begins."""
    inputs: tuple[Tensor, ...] = ()
    """What may be the residual stream that enters: kept until the part ends, up to the first one of a list that attends."""
    entering: TokenQuantities = NO_TOKENS
    leaving: TokenQuantities = NO_TOKENS
    attention: dict[str, AttentionQuantities] = field(default_factory=dict)
    """By the name of the module that attends, within this part."""
    calls: set[int] = field(default_factory=set)
    """Numbers of the attention calls."""
    activations: list[DeadUnits] = field(default_factory=list)

    @property
    def pattern(self) -> tuple[str, type]:
        """The same for the layers of a stack: where the part lies, numbers left out, and its class."""
        return re.sub(r"\d+", "*", self.name.rpartition(".")[0]), self.kind


def find_repeated_parts(model: nn.Module) -> dict[str, bool]:
    """Parts that may be layers, by name: items of lists (True), and attributes that have a class in common with a sibling (False)."""
    found: dict[str, bool] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        counts = Counter(type(child) for child in module.children())
        for own, child in module.named_children():
            if isinstance(module, LISTS) or counts[type(child)] > 1:
                found[prefix + own] = isinstance(module, LISTS)
    return found


def list_prefixes(name: str) -> Iterator[str]:
    """ "a", "a.b", "a.b.c" of "a.b.c"."""
    for end in (match.start() for match in re.finditer(r"\.|$", name)):
        yield name[:end]


def choose_layers(parts: Iterable[Part]) -> dict[str, list[Part]]:
    """The layers of each stack, in the order in which they ended, by the stack's name.

    Around an attention there may be several repeated parts, as in Swin, T5 or a list of lists. The layer is the one that is repeated most
    often; among those, the outermost. Attributes count only where nothing with attention is in a list, and then only if repeated.
    A model without such parts is one layer: its root.
    """
    attending = [part for part in parts if part.calls]
    items = [part for part in attending if part.in_list]
    counts = Counter(part.pattern for part in items or attending)
    if not items:
        items = [part for part in attending if counts[part.pattern] > 1] or [part for part in attending if not part.name]
    chosen: dict[int, Part] = {}
    for part in items:
        for call in part.calls:
            other = chosen.get(call)
            # Parts end from the inside to the outside, so of two that are repeated equally often the later one is the outer one.
            if other is None or counts[part.pattern] >= counts[other.pattern]:
                chosen[call] = part
    kept = {id(part) for part in chosen.values()}
    stacks: dict[tuple[str, type], list[Part]] = {}
    for part in items:
        if id(part) in kept:
            stacks.setdefault(part.pattern, []).append(part)
    return name_stacks(stacks)


def name_stacks(stacks: Mapping[tuple[str, type], list[Part]]) -> dict[str, list[Part]]:
    """By the place of the layers, and by their class too where two stacks are in one place."""
    places = Counter(place for place, _ in stacks)
    return {place if places[place] == 1 else f"{place} ({kind.__name__})": layers for (place, kind), layers in stacks.items()}


def find_tokens(given: Any) -> Tensor | None:
    """The first floating-point tensor with tokens and features among arguments or outputs, as [batch, m, n] or [m, batch, n]."""
    return next(list_tokens(given), None)


def list_tokens(given: Any) -> Iterator[Tensor]:
    """All of them: a mask that is added to logits, or the angles of positions, may come before the tokens."""
    for value in iterate_values(given):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2:
            x = value.detach()
            yield x[None] if x.ndim == 2 else x.flatten(1, -2)


def choose_entering(inputs: tuple[Tensor, ...], leaving: Tensor | None) -> Tensor:
    """A residual stream enters in the shape in which it leaves; where nothing does, as in a layer that merges tokens, the first input."""
    return next((x for x in inputs if leaving is not None and x.shape == leaving.shape), inputs[0])


def iterate_values(given: Any) -> Iterator[Any]:
    """Leaves of tuples, lists and mappings, in order."""
    if isinstance(given, Mapping):
        given = tuple(given.values())
    if isinstance(given, list | tuple):
        for value in given:
            yield from iterate_values(value)
    else:
        yield given
