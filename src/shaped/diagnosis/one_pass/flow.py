"""Finds the residual stream by what a pass computes, not by how the model is written: the result of an attention meets what it came from.

Every tensor has a node, which knows from what it was computed and from which attention calls. Where two tensors of one shape meet, and one
was computed from the other by an attention, the other is the stream before that attention: x in x + f(x), whatever the modules are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from shaped.diagnosis.one_pass.quantities import NO_TOKENS, TokenQuantities

PRODUCTS = {
    *(torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, Tensor.matmul, Tensor.bmm, Tensor.baddbmm),
    *(Tensor.__matmul__, Tensor.__rmatmul__),
}
MULTIPLES = {
    *(F.dropout, torch.dropout, torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.div, torch.div),
    *(torch.clone, Tensor.clone, Tensor.to, Tensor.float, Tensor.type_as, Tensor.contiguous),
}
"""The stream may be multiplied by a number or by gains, or copied, before something is added to it."""

Site = tuple[str, int]
"""The module that makes a tensor, and how many it has made since the last attention: the same in all layers of a stack."""


@dataclass(eq=False, slots=True)
class Node:
    """A tensor, until it is changed in place: then it has another node."""

    number: int
    """Sources have smaller ones."""
    find: Callable[[], Tensor | None]
    """The tensor, if it is still there; it may have changed."""
    shape: torch.Size
    func: Any
    """What computed it; None if that is not known."""
    sources: tuple[Node, ...]
    past: int
    """The attention calls that it was computed from, one bit each."""
    is_score: bool = False
    """Was it computed, entry by entry, from a product of two activations?"""
    site: Site | None = None
    tokens: TokenQuantities = NO_TOKENS
    """Of those that may be the residual stream."""

    def trace_back(self, other: Node) -> set[Node]:
        """The node itself and what it comes from, as far back as the other one."""
        waiting: list[Node] = [self]
        seen: set[Node] = {self}
        while waiting:
            new = {source for source in waiting.pop().sources if source.number >= other.number} - seen
            seen |= new
            waiting.extend(new)
        return seen


@dataclass(eq=False)
class Call:
    """A call of attention."""

    number: int
    past: int
    result: Node
    streams: list[Node] = field(default_factory=list)
    """What its result meets, the stream before it. Several where residual sums are nested, from the inside to the outside."""
    after: dict[Site | None, Node] = field(default_factory=dict)
    """What is made before the next call, at sites and in shapes in which other calls met the stream."""

    def is_in(self, past: int) -> bool:
        return bool(past >> self.number & 1)


class Flow:
    """Follows a pass. `measure` is given what may be the stream of a call."""

    def __init__(self, measure: Callable[[Tensor, Call], TokenQuantities] = lambda *_: NO_TOKENS):
        self.calls: list[Call] = []
        self.running = ""
        """The module that is running, numbers left out."""
        self._measure = measure
        self._nodes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._count = 0
        self._made: Counter[str] = Counter()
        self._sites: dict[Site, torch.Size] = {}

    def find(self, x: Tensor) -> Node:
        """Its node; a new one without sources if nothing is known of it, as of the model's inputs."""
        return self._nodes[x] if x in self._nodes else self._add(x, None, ())

    def measure(self, node: Node, call: Call) -> Node:
        """Its tokens, unless its tensor is gone."""
        x = node.find()
        if x is not None and self.find(x) is node and not node.tokens.tokens:
            node.tokens = self._measure(x, call)
        return node

    def connect(self, inputs: list[Node], calls: int, outputs: Any) -> None:
        """What a module computes by functions that PyTorch does not show comes from its inputs, and from the calls since its beginning."""
        for x in iterate_floats(outputs):
            if x not in self._nodes:
                self._add(x, None, (*inputs, *(call.result for call in self.calls[calls:])))

    def see_inputs(self, given: list[Tensor]) -> None:
        """Before a call, which may change them."""
        for a, b in permutations(map(self.find, given), 2) if len(given) > 1 else ():
            if a.past != b.past and not a.past & ~b.past and a.shape == b.shape and len(a.shape) > 1:
                self._meet(a, b)

    def see_result(self, func: Any, given: list[Tensor], result: Any) -> None:
        results = given[:1] if func is Tensor.__setitem__ else tuple(iterate_floats(result))
        sources = tuple(map(self.find, given)) if results else ()
        for x in results:
            node = self._add(x, func, sources)
            self._made[self.running] += 1
            node.site = self.running, self._made[self.running]
            node.is_score = is_product(func, given) or any(source.is_score and source.shape.numel() <= x.numel() for source in sources)
            if self._sites.get(node.site) == x.shape:
                self.calls[-1].after[node.site] = self.measure(node, self.calls[-1])

    def see_attention(self, func: Any, given: list[Tensor], result: Tensor) -> None:
        node = self._add(result, func, tuple(map(self.find, given)))
        self.calls.append(Call(len(self.calls), node.past, node))
        node.past |= 1 << self.calls[-1].number
        self._made.clear()

    def _add(self, x: Tensor, func: Any, sources: tuple[Node, ...]) -> Node:
        self._count += 1
        past = reduce(lambda past, source: past | source.past, sources, 0)
        node = self._nodes[x] = Node(self._count, TensorWeakRef(x), x.shape, func, sources, past)
        return node

    def _meet(self, a: Node, b: Node) -> None:
        """b has attention calls that a has not: is a, or what it is a multiple of, the stream before one of them?"""
        while a not in b.trace_back(a):
            factors = [source for source in a.sources if source.shape == a.shape] if a.func in MULTIPLES else []
            if not factors:
                return
            a = factors[0]
        joined = [call for call in self.calls if call.is_in(b.past & ~a.past)]
        # The first one, where all earlier attention has met its own.
        new = [call for call in joined if not call.streams and all(other.streams for other in joined if other.is_in(call.past))]
        # Then those around it, which are older and come from the same attention.
        inner = [(call, call.streams[-1]) for call in joined if call.streams]
        new += [call for call, node in inner if a.past == node.past and a in node.trace_back(a)]
        for call in new:
            call.streams.append(self.measure(a, call))
            if a.past and a.site:
                self._sites[a.site] = a.shape


def is_product(func: Any, given: list[Tensor]) -> bool:
    """Of two activations. Weights have two dimensions at most."""
    return func in PRODUCTS and sum(x.ndim >= 3 and not isinstance(x, nn.Parameter) for x in given[-2:]) == 2


def iterate_floats(given: Any) -> Iterator[Tensor]:
    """Floating-point tensors in tuples, lists and mappings, in order."""
    return (x for x in iterate_values(given) if isinstance(x, Tensor) and x.is_floating_point())


def iterate_values(given: Any) -> Iterator[Any]:
    """Leaves of tuples, lists and mappings, in order."""
    if isinstance(given, Mapping):
        given = tuple(given.values())
    if isinstance(given, list | tuple):
        for value in given:
            yield from iterate_values(value)
    else:
        yield given
