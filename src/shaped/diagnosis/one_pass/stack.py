"""Finds the layers of a model, from what it calls: the repeated part around each attention, and the residual stream between these parts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shaped.diagnosis.one_pass.flow import Call, iterate_floats
from shaped.diagnosis.one_pass.quantities import NO_TOKENS, AttentionQuantities, DeadUnits, TokenQuantities

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Row:
    """The class of parts that are no module: the items with one number of several lists (`find_rows`)."""


@dataclass(eq=False)
class Part:
    """One visit to a part of the model: a module's call, or the calls within an item of a list that is itself never called."""

    name: str
    kind: type
    in_list: bool
    """Is it an item of a list? Others are attributes that have a class in common with a sibling."""
    called: bool = False
    """Is it a module that is called itself? Else it ends where a module outside of it begins."""
    items: list[str] = field(default_factory=list)
    """Of lists that are run through together (`find_rows`): the items that began."""
    frame: int = 0
    """How many modules were running when it began."""
    inputs: tuple[Tensor, ...] = ()
    """What may be the residual stream that enters: kept until the part ends, up to the first one of a list that attends."""
    entering: TokenQuantities = NO_TOKENS
    leaving: TokenQuantities = NO_TOKENS
    sums: int = 0
    """How many residual sums its attention had met when it ended."""
    attention: dict[str, AttentionQuantities] = field(default_factory=dict)
    """By the name of the module that attends, within this part."""
    calls: list[Call] = field(default_factory=list)
    activations: list[DeadUnits] = field(default_factory=list)

    @property
    def pattern(self) -> tuple[str, type]:
        """The same for the layers of a stack: where the part lies, numbers left out, and its class."""
        place, lists = self.name.rpartition(".")[0], ""
        if self.kind is Row:  # digits in the names of its lists are no numbers of layers
            place, dot, lists = place.rpartition(".")
            lists = dot + lists
        return re.sub(r"\d+", "*", place) + lists, self.kind

    def find_own_name(self, name: str) -> str | None:
        """What a module or a weight is called within the part, the same in all layers; None if it is not within it."""
        for owner in self.items if self.kind is Row else (self.name,):
            if not owner:
                return name
            if name == owner or name.startswith(f"{owner}."):
                kept = owner.rpartition(".")[0].rpartition(".")[2] if self.kind is Row else ""  # a list, without the number
                return (kept + name[len(owner) :]).lstrip(".")
        return None


def find_repeated_parts(model: nn.Module) -> dict[str, bool]:
    """Parts that may be layers, by name: items of lists (True), and attributes (False).

    Of attributes those that have a class in common with a sibling, and those outside of all lists, which may be called again and again.
    """
    found: dict[str, bool] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        counts = Counter(type(child) for child in module.children())
        for own, child in module.named_children():
            is_outside = not any(found.get(other) for other in list_prefixes(name)) and not any(map(is_list, child.modules()))
            if isinstance(module, LISTS) or counts[type(child)] > 1 or is_outside:
                found[prefix + own] = isinstance(module, LISTS)
    return found


def is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList)


def find_rows(model: nn.Module) -> dict[str, str]:
    """Items of lists beside each other that are equally long, by name: the name of the row that they share.

    A model may run through its lists together: `for attention, feedforward in zip(self.attentions, self.feedforwards)`.
    """
    rows: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        lists = {own: child for own, child in module.named_children() if isinstance(child, nn.ModuleList) and len(child) > 1}
        for length in {len(child) for child in lists.values()}:
            names = [own for own, child in lists.items() if len(child) == length]
            if len(names) > 1:
                rows |= {f"{prefix}{own}.{number}": f"{prefix}{'+'.join(names)}.{number}" for own in names for number in range(length)}
    return rows


def list_prefixes(name: str) -> Iterator[str]:
    """ "a", "a.b", "a.b.c" of "a.b.c"."""
    for end in (match.start() for match in re.finditer(r"\.|$", name)):
        yield name[:end]


def choose_layers(parts: Iterable[Part]) -> dict[str, list[Part]]:
    """The layers of each stack, in the order in which they ended, by the stack's name.

    Around an attention there may be several repeated parts, as in Swin, T5 or a list of lists. The layer is the one that is repeated most
    often; among those, the outermost. Attributes count only where nothing with attention is in a list, and then only if repeated.
    Heads that are modules of a list are repeated most often of all, but attend to the same stream: they are no layers.
    A model without such parts is one layer: its root.
    """
    attending = [part for part in parts if part.calls and (part.kind is not Row or len(part.items) > 1)]
    visits = Counter(part.pattern for part in attending)
    streams = Counter(pattern for pattern, *_ in {(part.pattern, *(part.calls[0].streams or [part])) for part in attending})
    attending = [part for part in attending if not part.name or 2 * streams[part.pattern] > visits[part.pattern]]
    items = [part for part in attending if part.in_list]
    counts = Counter(part.pattern for part in items or attending)
    if not items:
        items = [part for part in attending if counts[part.pattern] > 1] or [part for part in attending if not part.name]
    # Parts end from the inside to the outside, so of two that are repeated equally often the later one is the outer one.
    chosen = {call: part for part in sorted(items, key=lambda part: counts[part.pattern]) for call in part.calls}
    stacks: dict[tuple[str, type], list[Part]] = {}
    for part in items:
        if part in chosen.values():
            stacks.setdefault(part.pattern, []).append(part)
    for layers in stacks.values():
        follow_stream(layers)
    return name_stacks(stacks)


def follow_stream(layers: list[Part]) -> None:
    """The stream behind a layer is what it returns, or where its residual sum is outside of it, what the next attention is added to.

    Behind the last layer that is what is made at the same site, if the others have one in common.
    """
    if not has_stream(layers):  # all that is known is what enters and leaves the layers
        return
    level = min(len(part.calls[0].streams) for part in layers)
    streams = [part.calls[0].streams[level - 1] for part in layers]
    pairs = zip(layers, streams[1:], strict=False)
    nexts = [after if part.calls[-1].is_in(after.past) else None for part, after in pairs]
    sites = {node.site for node in nexts if node} or {call.streams[0].site for call in layers[0].calls[1:] if call.streams}
    site = sites.pop() if len(sites) == 1 else None
    layers[0].entering = streams[0].tokens
    for part, after in zip(layers, [*nexts, None], strict=True):
        if part.sums < level or not part.leaving.tokens:
            after = after or part.calls[-1].after.get(site)
            part.leaving = after.tokens if after else NO_TOKENS


def has_stream(layers: list[Part]) -> bool:
    return all(part.calls[0].streams for part in layers)


def name_stacks(stacks: Mapping[tuple[str, type], list[Part]]) -> dict[str, list[Part]]:
    """By the place of the layers, and by their class too where two stacks are in one place."""
    places = Counter(place for place, _ in stacks)
    return {place if places[place] == 1 else f"{place} ({kind.__name__})": layers for (place, kind), layers in stacks.items()}


def list_tokens(given: Any) -> tuple[Tensor, ...]:
    """What may be tokens among arguments or outputs: a mask that is added to logits, or the angles of positions, may come before them."""
    return tuple(arrange_tokens(x) for x in iterate_floats(given) if x.ndim >= 2)


def arrange_tokens(x: Tensor, tokens: int = 0) -> Tensor:
    """[batch, m, n] or [m, batch, n]. Features are the last dimension, unless only another one leaves as many tokens as there are queries,
    as in images, [batch, n, height, width]."""
    x, n = x.detach(), x.numel() // tokens if tokens else x.shape[-1]
    if x.ndim > 2 and x.shape[-1] != n and x.shape[1:].count(n) == 1:
        x = x.movedim(1 + x.shape[1:].index(n), -1)
    return x[None] if x.ndim == 2 else x.flatten(1, -2)


def choose_entering(inputs: tuple[Tensor, ...], leaving: Tensor | None) -> Tensor:
    """A residual stream enters in the shape in which it leaves; where nothing does, as in a layer that merges tokens, the first input."""
    return next((x for x in inputs if leaving is not None and x.shape == leaving.shape), inputs[0])
