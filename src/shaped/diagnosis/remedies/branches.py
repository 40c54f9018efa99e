"""Weaker residual branches, whatever the model's classes are: x + factor · f(x) in place of x + f(x)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from shaped.diagnosis.one_pass.attention_calls import PRODUCTS, SUMS
from shaped.diagnosis.one_pass.stack import iterate_values
from shaped.diagnosis.remedies.changes import CallChange
from shaped.nn.attention import shaped_attention

IN_PLACE = {Tensor.add_, Tensor.__iadd__}
WEIGHTED = PRODUCTS | {
    *(F.linear, torch.addmm, torch.mm, Tensor.mm, F.conv1d, F.conv2d, torch.conv1d, torch.conv2d),
    *(F.scaled_dot_product_attention, shaped_attention),
}


class WeakenBranches(CallChange):
    """A branch is a summand that was computed from the other summand, through a product with weights.

    So neither rotary embeddings nor sums within an activation are branches. Tensors are numbered in the order of their computation: what a
    tensor comes from has smaller numbers.
    """

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._sources: list[tuple[int, ...]] = []
        self._weighted: list[bool] = []

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sources = tuple(self._find_number(x) for x in iterate_values((args, kwargs)) if is_activation(x))
        if func in SUMS and len(args) == 2 and not kwargs and all(map(is_activation, args)) and args[0].shape == args[1].shape:
            first, second = args
            if self._is_branch(second, first):
                args = (first, self.factor * second)
            elif self._is_branch(first, second):
                args = (first.mul_(self.factor) if func in IN_PLACE else self.factor * first, second)
        result = func(*args, **kwargs)
        for x in iterate_values(result):
            if is_activation(x):
                self._numbers[x] = self._add(sources, func in WEIGHTED)
        return result

    def _find_number(self, x: Tensor) -> int:
        if x not in self._numbers:
            self._numbers[x] = self._add((), False)
        return self._numbers[x]

    def _add(self, sources: tuple[int, ...], weighted: bool) -> int:
        self._sources.append(sources)
        self._weighted.append(weighted)
        return len(self._sources) - 1

    def _is_branch(self, x: Tensor, stream: Tensor) -> bool:
        root = self._numbers[stream]
        waiting, seen, weighted = [self._numbers[x]], set(), False
        while waiting:
            number = waiting.pop()
            if number > root and number not in seen:
                seen.add(number)
                weighted = weighted or self._weighted[number]
                waiting += self._sources[number]
            elif number == root:
                seen.add(number)
        found = root in seen and weighted
        self.applied += found
        return found


def is_activation(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and not isinstance(x, nn.Parameter)
